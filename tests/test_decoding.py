"""Speculative decoding is lossless whatever the drafter says; its numbers are what they say."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from dflash_lightning import DrafterConfig, HFTarget, RandomTarget, export_drafter
from dflash_lightning.decoding import decode, plain_generate, speculative_generate
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.drafter.start import init_random

PROMPT = torch.tensor([[5, 9, 17, 30, 4]])


def make_drafter(target: HFTarget, block_size: int = 4, seed: int = 0, **dials: object) -> Drafter:
    config = DrafterConfig(
        num_layers=2, block_size=block_size, target_layer_ids=(0, 2), mask_token_id=3, **dials
    )
    drafter = Drafter(config.for_target(target.config)).eval()
    init_random(drafter, seed)
    return drafter


def greedy(target: HFTarget, count: int) -> list[int]:
    """The target's own greedy output, recomputed from scratch at every token."""
    ids = PROMPT
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat([ids, target.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, PROMPT.shape[1] :].tolist()


class Script(Drafter):
    """Drafts what it is told: hidden states whose best token under the head is the scripted one."""

    def __init__(self, like: Drafter, target: HFTarget, answer: list[int], right: int) -> None:
        super().__init__(like.spec)
        self.target, self.answer, self.right = target, answer, right

    def draft(self, cache, block_embeddings):
        start = cache.length - PROMPT.shape[1] + 1
        wanted = (self.answer + [0] * 64)[start : start + self.spec.block_size - 1]
        wanted = [token if k < self.right else (token + 1) % 97 for k, token in enumerate(wanted)]
        head = self.target.head_weight
        # the pseudo-inverse of the head puts (almost) all weight on one token
        onehot = torch.nn.functional.one_hot(torch.tensor(wanted), head.shape[0]).float()
        hidden = onehot @ torch.linalg.pinv(head.float()).T
        return torch.cat([block_embeddings[:, :1], hidden[None] * 1e3], dim=1)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_output_is_the_targets_own(model_type: str, seed: int) -> None:
    target = RandomTarget(model_type, seed=seed).load()
    out = speculative_generate(target, make_drafter(target, seed=seed), PROMPT, max_new_tokens=40)
    assert out.ids == greedy(target, 40)
    assert out.ids == plain_generate(target, PROMPT, max_new_tokens=40).ids


def test_sliding_layers_decode_losslessly() -> None:
    target = RandomTarget().load()
    kinds = ("sliding_attention", "full_attention")
    drafter = make_drafter(target, layer_types=kinds, sliding_window=6)
    out = speculative_generate(target, drafter, PROMPT, max_new_tokens=30)
    assert out.ids == greedy(target, 30)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_a_drafter_that_is_right_for_n_tokens_has_n_accepted(right: int) -> None:
    target = RandomTarget(vocab_size=60).load()
    answer = greedy(target, 64)
    drafter = Script(make_drafter(target), target, answer, right)
    out = speculative_generate(target, drafter, PROMPT, max_new_tokens=25)
    assert out.ids == answer[:25]
    assert set(out.accepted) == {right}
    assert out.tau == right + 1
    # one call for the prompt and its first token, then right + 1 tokens a call
    assert out.target_calls == 1 + -(-24 // (right + 1))


def test_an_end_token_inside_an_accepted_block_ends_the_output() -> None:
    target = RandomTarget(vocab_size=60).load()
    answer = greedy(target, 64)
    first = {token: i for i, token in reversed(list(enumerate(answer)))}
    end, at = max(first.items(), key=lambda item: item[1])
    drafter = Script(make_drafter(target), target, answer, 3)
    for ends in (frozenset([end]), frozenset([answer[0]])):
        out = speculative_generate(target, drafter, PROMPT, max_new_tokens=64, end_ids=ends)
        stop = at if end in ends else 0
        assert out.ids == answer[: stop + 1]
        plain = plain_generate(target, PROMPT, max_new_tokens=64, end_ids=ends)
        assert plain.ids == out.ids


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_more_tokens_than_asked(count: int) -> None:
    target = RandomTarget().load()
    drafter = make_drafter(target, block_size=8)
    assert len(speculative_generate(target, drafter, PROMPT, max_new_tokens=count).ids) == count


@pytest.mark.slow
def test_sampling_keeps_the_targets_distribution() -> None:
    target = RandomTarget(vocab_size=8).load()
    drafter = make_drafter(target, block_size=3)
    prompt = PROMPT % 8
    draws, temperature = 1500, 0.3
    seen: Counter[tuple[int, int]] = Counter()
    for seed in range(draws):
        out = speculative_generate(
            target, drafter, prompt, max_new_tokens=2, temperature=temperature, seed=seed
        )
        seen[out.ids[0], out.ids[1]] += 1
    expected = {}
    with torch.inference_mode():
        first = torch.softmax(target.model(prompt).logits[0, -1] / temperature, -1)
        for a in range(8):
            row = torch.cat([prompt, torch.tensor([[a]])], dim=1)
            second = torch.softmax(target.model(row).logits[0, -1] / temperature, -1)
            expected.update({(a, b): float(first[a] * second[b]) for b in range(8)})
    chi2 = sum((seen[k] - draws * p) ** 2 / (draws * p) for k, p in expected.items())
    assert chi2 < 63 + 4 * (2 * 63) ** 0.5  # four deviations above the mean of 63 degrees


def test_verification_with_a_cache_equals_a_whole_forward() -> None:
    target = RandomTarget("llama").load()
    cache = DynamicCache()
    logits = [target.verify(part, cache, (0, 2)) for part in PROMPT.split([2, 3], dim=1)]
    whole = target.model(PROMPT).logits
    torch.testing.assert_close(torch.cat([x for x, _ in logits], dim=1), whole)
    features = torch.cat([f for _, f in logits], dim=1)
    torch.testing.assert_close(features, target.context_features(PROMPT, (0, 2)))


def test_decode_command_reports_equality_and_tau_by_source(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = HFTarget(str(target_folder), "float32").load()
    export_drafter(make_drafter(target), tmp_path / "drafter", target=str(target_folder))
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"id": f"p{i}", "source": "ab"[i % 2], "messages": [{"role": "user", "content": f"hi {i}"}]}
        for i in range(4)
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    report = tmp_path / "report.json"
    decode(
        str(tmp_path / "drafter"),
        str(target_folder),
        prompts,
        max_new_tokens=12,
        untrained=True,
        json=report,
    )
    numbers = json.loads(report.read_text())
    for name in ("trained", "untrained"):
        assert numbers[name]["equal"] == 4
        assert set(numbers[name]["tau_by_source"]) == {"a", "b"}
        tau, low, high = numbers[name]["tau"]
        assert 1 <= low <= tau <= high <= 4
    printed = capsys.readouterr().out
    assert "trained: tau" in printed
    assert "4 of 4 prompts" in printed
