"""What the tests of zero_std_groups=resample share: a reward that makes some prompts flat, by-hand draws, what a rollout kept."""

from toyrun import SETTINGS, fixed_rollout, trainer

from trl_lossplus.toy import toy_dataset
from trl_lossplus.trainers.resample import PromptStream, draw_size, left

GROUPS = {"num_generations": 4, "per_device_train_batch_size": 16, "shuffle_dataset": False}  # 4 prompts a rollout, in order
RESAMPLE = {"zero_std_groups": "resample", **GROUPS}
FLAT_WORDS = ("apple", "stone", "tiger")  # of 8 keywords: 3 of 8 prompts


def some_flat(prompts, completions, keyword, **kwargs):
    """The number of letters over 10; 0.5 for the prompts of three keywords. `keyword` must be the prompt's own."""
    assert all(word in prompt.split() for word, prompt in zip(keyword, prompts, strict=True))
    return [0.5 if word in FLAT_WORDS else len(text) / 10 for word, text in zip(keyword, completions, strict=True)]


def is_flat(prompt):
    return any(word in prompt.split() for word in FLAT_WORDS)


class SeePrompts:
    """Keeps the prompts of each rollout, one a group, as TRL's table of completions has them; each rollout logs once."""

    def __init__(self, run):
        self.prompts, self.tables, self._inner = [], [], run.make_rollout
        self.run = run
        run.make_rollout = self

    def __call__(self, out, rewards):
        rows = len(rewards)
        table = {name: list(self.run._logs[name])[-rows:] for name in ("prompt", "completion", "advantages")}
        table |= {name: list(values)[-rows:] for name, values in self.run._logs["rewards"].items()}
        table |= {name: list(values)[-rows:] for name, values in self.run._logs["extra"].items()}
        self.tables.append(table)
        self.prompts.append(table["prompt"][:: self.run.num_generations])
        return self._inner(out, rewards)


def trained(toy, folder, callbacks=None, reward=some_flat, rollout=fixed_rollout, resume=None, **fields):
    run = trainer(toy, folder, reward=reward, rollout=rollout, callbacks=callbacks, **fields)
    seen = SeePrompts(run)
    run.train(resume_from_checkpoint=resume)
    return run, seen


def by_hand(steps, places=4, seed=SETTINGS["seed"]):
    """[kept prompts, prompts drawn in all, flat among them] of each rollout, from the dataset, the order and the stream alone."""
    rows = [row["prompt"] for row in toy_dataset()]
    stream, position, found = PromptStream(toy_dataset(), seed), 0, []
    for step in range(steps):
        own = [rows[(step * places + i) % len(rows)] for i in range(places)]
        flat, drawn = [[is_flat(prompt) for prompt in own]], [own]
        while left(flat):
            start = position + sum(len(draw) for draw in drawn[1:])
            drawn.append([stream.row(start + i)["prompt"] for i in range(draw_size(flat, 1))])
            flat.append([is_flat(prompt) for prompt in drawn[-1]])
        new = iter([prompt for draw in drawn[1:] for prompt in draw if not is_flat(prompt)])
        kept = [next(new) if is_flat(prompt) else prompt for prompt in own]
        whole = [prompt for draw in drawn for prompt in draw]
        found.append((kept, len(whole), sum(map(is_flat, whole)), len(drawn)))
        if kept != own:  # up to the last prompt that was taken; what was drawn beyond it comes again
            last = [prompt for prompt, before in zip(kept, own, strict=True) if is_flat(before)][-1]
            position += [prompt for draw in drawn[1:] for prompt in draw].index(last) + 1
    return found
