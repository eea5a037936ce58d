"""Decides whether an engine's log-probabilities may train a policy: they must be of the distribution that was sampled.

An engine that reports raw log-probabilities (before the temperature) would put a silent bias into every importance
ratio. So each role that opens an engine asks it for the same tokens at two temperatures first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.schemas.errors import EngineError, ModelError

from . import Engine, GenerationRequest, Progress, Sampling

COLD = 0.05  # so cold that nearly always the likeliest token is drawn: the same as greedily
TOKENS = 8
SURE = -0.01  # nats: a token surer than this has about the same log-probability at any temperature
EQUAL = 1e-3  # nats: more than two forwards of one engine differ by, in any dtype that serves
TEXTS = ("The", "Once upon a time", "1 2 3", "import")

# What a caller may ask of an OpenAI-compatible endpoint that changes the sampled distribution, and the value at which
# it doesn't. None stands for "not given".
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "typical_p": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "min_tokens": (None, 0),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "use_beam_search": (None, False),
}


def refused_for_training(asked: Mapping[str, Any]) -> list[str]:
    """What of the parameters that were asked for makes tokens that can't be trained on, each as `name=value`: a
    temperature that isn't above 0, and whatever filters or bends the distribution, since the trainer computes the plain
    one."""
    refused = [f"{name}={asked[name]!r}" for name, neutral in NEUTRAL.items()
               if name in asked and asked[name] not in neutral]  # fmt: skip
    temperature = asked.get("temperature")
    if temperature is not None and not temperature > 0:
        refused.append(f"temperature={temperature!r}")
    return refused


def probe(engine: Engine) -> None:
    """Drive an engine that has nothing else to do. Raises ModelError where it reports raw log-probabilities, or none
    that a log-probability can be."""
    for text in TEXTS:
        prompt = engine.encode_chat([{"role": "user", "content": text}])
        greedy = _run(engine, prompt, Sampling(1.0, TOKENS, 0, greedy=True))
        cold = _run(engine, prompt, Sampling(COLD, TOKENS, 0))
        if judge(greedy, cold, engine.fingerprint().get("engine", "engine")):
            return
    # A model that is sure of every token tells nothing, and its raw and processed log-probabilities are the same.


def judge(greedy: Sequence[Progress], cold: Sequence[Progress], name: str) -> bool:
    """Whether two answers to one prompt prove that the second's log-probabilities are of its own temperature. Raises
    ModelError where they prove the opposite."""
    told = False
    for (token, at_one), (same, at_cold) in zip(_pairs(greedy), _pairs(cold), strict=False):
        for value in (at_one, at_cold):
            if not np.isfinite(value) or value > EQUAL:
                raise ModelError(f"the {name} engine reports {value} as the log-probability of a token that it sampled")
        if token != same:
            break  # from here on the two have other contexts
        if at_one < SURE:
            if abs(at_one - at_cold) < EQUAL:
                raise ModelError(
                    f"the {name} engine reports raw log-probabilities: the same {at_one:.4f} at temperatures 1 and "
                    f"{COLD}. Training needs those of the sampled distribution: start vLLM with --logprobs-mode "
                    "processed_logprobs"
                )
            told = True
    return told


def _pairs(answer: Sequence[Progress]) -> Iterator[tuple[int, float]]:
    return itertools.chain.from_iterable(zip(one.token_ids.tolist(), one.logprobs.tolist(), strict=True)
                                         for one in answer)  # fmt: skip


def _run(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> list[Progress]:
    name = f"probe/{sampling.temperature}/{sampling.greedy}"
    engine.submit(GenerationRequest(name, prompt, sampling))
    out: list[Progress] = []
    while not out or out[-1].finished is None:
        out += [one for one in engine.step() if one.request_id == name]
    if out[-1].finished == "lost":
        raise EngineError("the engine gave the probe up: it can't serve")
    return out
