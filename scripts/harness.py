"""Run tasks of the lm-evaluation-harness on a trained model (pip install -e '.[eval]'):

    python scripts/harness.py ckpt=last tasks=lambada_openai,hellaswag limit=200

limit=: number of questions per task (default: all); ckpt=, device=, precision= and runs_dir= as for
scripts/generate.py; attention=... uses another implementation. The harness downloads the tasks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from conf.values import UserError

if TYPE_CHECKING:
    from data.tokenizer_base import Tokenizer
    from model.gpt import GPT

KEYS = {
    "ckpt": "last", "tasks": "", "limit": None, "device": "auto", "precision": "auto", "runs_dir": None
}  # fmt: skip
MOST_NEW_TOKENS = 256  # where a task says nothing


class Answers:
    """What the harness asks of a model, for plain arguments."""

    def __init__(self, net: GPT, tokenizer: Tokenizer):
        self.net, self.tokenizer = net.eval(), tokenizer

    def loglikelihood(self, context: str, answer: str) -> tuple[float, bool]:
        """Of `answer` behind `context`, and whether it is the greedy one. Both are tokenised as one text: a
        token may span the border. An answer beyond the trained context is taken in halves of that."""
        from model.evaluation import continuation

        stripped = context.rstrip()  # spaces belong to the word that follows
        answer, context = context[len(stripped) :] + answer, stripped
        whole, before = self.tokenizer.encode(context + answer), self.tokenizer.encode(context)
        if not before:
            before, whole = [self._start()], [self._start(), *whole]
        most = self.net.config.seq_len
        size = most if len(whole) - len(before) <= most else max(1, most // 2)
        begins = range(len(before), len(whole), size)
        parts = [continuation(self.net, whole[:at], whole[at : at + size]) for at in begins]
        return sum((likely for likely, _ in parts), 0.0), all(greedy for _, greedy in parts)

    def rolling(self, text: str) -> float:
        """The log-likelihood of all of a text, behind the end of another."""
        from model.evaluation import score

        begin, ids = self.tokenizer.encode(""), self.tokenizer.encode(text)
        if ids == begin:
            return 0.0
        ids = ids if begin else [self._start(), *ids]
        return -score(self.net, ids, stride=self.net.config.seq_len).nats

    def generate(self, context: str, until: Sequence[str], most: int) -> str:
        """Greedy text behind the end of `context`, up to the first of `until`; of the context at least half
        of what the model was trained with, if there is as much."""
        from model.generation.generate import generate

        trained = self.net.config.seq_len
        ids = self.tokenizer.encode(context)[-max(trained - most, trained // 2, 1) :] or [self._start()]
        eot = self.tokenizer.eot
        new = generate(self.net, [ids], max_new_tokens=most, temperature=0.0, eot=eot).tokens[0]
        seen = self.tokenizer.decode(ids)  # a decoder may strip the space with which a text begins
        text = self.tokenizer.decode([*ids, *(token for token in new if token != eot)])[len(seen) :]
        ends = [at for at in (text.find(end) for end in until if end) if at >= 0]
        return text[: min(ends, default=None)]

    def _start(self) -> int:
        """The token that a text follows; without one, a model of characters has seen lines end."""
        return self.tokenizer.encode("\n")[0] if self.tokenizer.eot is None else self.tokenizer.eot


def harness_model(answers: Answers) -> Any:
    """`answers` as the harness's own class of models."""
    from lm_eval.api.model import LM

    class TileGPT(LM):
        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return [answers.loglikelihood(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return [answers.rolling(*request.args) for request in requests]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            found = []
            for context, settings in (request.args for request in requests):
                until = settings.get("until") or []
                until = [until] if isinstance(until, str) else until
                found.append(answers.generate(context, until, settings.get("max_gen_toks", MOST_NEW_TOKENS)))
            return found

    return TileGPT()


def main(arguments: Sequence[str]) -> None:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(f"scripts/harness.py\n\n{__doc__}", end="")
        return
    from conf.command import user_errors

    user_errors(run)(arguments)


def run(arguments: Sequence[str]) -> None:
    from conf.command import key_values
    from conf.trained import load_model, require_causal
    from scripts.evaluate import whole_number
    from scripts.generate import finite, placement

    try:
        import lm_eval
    except ImportError:
        raise UserError("lm_eval is not installed: pip install -e '.[eval]'.") from None
    overrides = [argument for argument in arguments if argument.split("=")[0].split(".")[0] == "attention"]
    options = key_values([argument for argument in arguments if argument not in overrides], KEYS)
    limit = whole_number("limit", options["limit"])
    device, dtype = placement(str(options["device"]), str(options["precision"]))
    net, tokenizer, _ = load_model(str(options["ckpt"]), overrides, options["runs_dir"])
    require_causal(net, f"ckpt={options['ckpt']}")
    net = finite(net, f"ckpt={options['ckpt']}", str(options["precision"]), device, dtype)
    model = harness_model(Answers(net, tokenizer))
    found = lm_eval.simple_evaluate(model=model, tasks=str(options["tasks"]).split(","), limit=limit)
    print(json.dumps(found["results"], indent=2, default=str))


if __name__ == "__main__":
    main(sys.argv[1:])
