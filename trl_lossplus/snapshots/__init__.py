"""What a loss read and gave, on disk: saved, compared, and replayed under another loss."""

from .diff import Difference, diff
from .replay import Replay, replay
from .store import Snapshot

__all__ = ["Difference", "Replay", "Snapshot", "diff", "replay"]
