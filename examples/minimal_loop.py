"""GRPO-RoC with a sandboxed Python tool in one process, to read in one sitting.

The model is sampled by transformers and updated by PyTorch; `recipes/` does the same with vLLM, Ray and DeepSpeed.

    python recipes/sft.py --run-dir runs/minimal                  # a model that calls the tool: 3 minutes on two cores
    python -m examples.minimal_loop runs/minimal/checkpoints/sft-step-001000/model
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rstar_ray import trajectory as records
from rstar_ray.agent.rollout import RolloutState, run_rollout, score
from rstar_ray.algorithm.advantage import group_advantages, rewards_differ
from rstar_ray.algorithm.normalisation import token_weights
from rstar_ray.algorithm.resample import resample_on_correct
from rstar_ray.algorithm.surrogate import clipped_surrogate
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.config import AlgorithmConfig, ChatConfig, SandboxConfig
from rstar_ray.reward.find import find_answer
from rstar_ray.reward.judge import Judgement
from rstar_ray.tiny.tiny_problems import generate_problems
from sandbox.limits import program_limits
from sandbox.outcomes import tool_text
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest

LIMITS = records.RolloutLimits(max_response_tokens=192, max_turns=4, max_context_tokens=512, max_calls_per_turn=1)
ALGORITHM = AlgorithmConfig()


class Sampler:
    """Completions of the model; rollouts that ask at the same time share a batch of B."""

    def __init__(self, model: Any, end_id: int) -> None:
        self.model, self.end_id, self.waiting = model, end_id, list[tuple[list[int], int, asyncio.Future[Any]]]()

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int, **_: object) -> records.Completion:
        loop = asyncio.get_running_loop()
        self.waiting.append((list(prompt_ids), max_tokens, loop.create_future()))
        if len(self.waiting) == 1:
            loop.call_later(0.05, self.sample)  # by then the other rollouts have asked, too
        return await self.waiting[-1][2]

    @torch.no_grad()
    def sample(self) -> None:
        (prompts, rooms, futures), self.waiting = zip(*self.waiting, strict=True), []
        longest = max(map(len, prompts))
        ids_BL = torch.tensor([[self.end_id] * (longest - len(ids)) + ids for ids in prompts])
        mask_BL = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        made = self.model.generate(
            ids_BL, attention_mask=mask_BL, do_sample=True, top_k=0, max_new_tokens=max(rooms),
            eos_token_id=self.end_id, pad_token_id=self.end_id, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens_BT = made.sequences[:, longest:]
        logprobs_BT = torch.stack(made.logits, 1).log_softmax(-1).gather(-1, tokens_BT[:, :, None])[:, :, 0]
        for future, room, ids, logprobs in zip(futures, rooms, tokens_BT.tolist(), logprobs_BT.tolist(), strict=True):
            count = min(room, ids.index(self.end_id) + 1 if self.end_id in ids else len(ids))
            ended, versions = ids[count - 1] == self.end_id, [0] * count
            future.set_result(records.Completion(
                token_ids=ids[:count], logprobs=logprobs[:count], policy_versions=versions, ended=ended
            ))  # fmt: skip


async def exact(completion: str, problem: records.Problem) -> Judgement:
    """The reward: 1 where the last `<answer>` is the truth."""
    return Judgement(float((find_answer(completion, "answer") or "").strip() == problem.answer))


def sampled_logprobs(model: Any, trajectory: records.Trajectory) -> Tensor:
    """Log-probs [N] of the tokens that the policy sampled, with a gradient."""
    ids = torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids])).long()
    logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return logprobs[len(trajectory.prompt_ids) - 1 :][torch.from_numpy(trajectory.loss_mask)]


async def train(folder: Path, steps: int, prompts: int, seed: int = 0) -> list[float]:
    """GRPO-RoC from the model in `folder`; the mean reward of every step."""
    torch.manual_seed(seed)
    rng, rewards_seen, sandbox = np.random.default_rng(seed), list[float](), SandboxConfig(slots=2)
    chat = load_chat(folder, ChatConfig(), instruct=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    sampler, problems = (
        Sampler(model, chat.profile.stop_token_ids[0]),
        generate_problems(seed, "train", steps * prompts),
    )
    async with SandboxPool(sandbox) as pool:

        async def execute(call: records.ToolCall) -> records.ToolResult:
            request = ExecutionRequest(code=call.code, stdin=call.stdin, limits=program_limits(sandbox))
            result = await pool.run(request)
            return records.ToolResult(outcome=result.outcome, text=tool_text(result))

        async def rollout(problem: records.Problem, sibling: int) -> records.Trajectory:
            request = records.RolloutRequest(
                rollout_id=f"{problem.id}/{sibling}", group_id=problem.id, problem=problem, seed=sibling,
                limits=LIMITS, sampling=records.UNMODIFIED,
            )  # fmt: skip
            state = RolloutState.start(request, chat.prompt_ids(problem))
            return await score(await run_rollout(state, generate=sampler.generate, execute=execute, chat=chat), exact)

        for step in range(steps):
            drawn = problems[step * prompts : (step + 1) * prompts]
            asked = [rollout(problem, sibling) for problem in drawn for sibling in range(ALGORITHM.num_rollouts)]
            finished = await asyncio.gather(*asked)  # 2G for each problem
            rows = list[tuple[records.Trajectory, float]]()
            for problem in drawn:
                group = [one for one in finished if one.problem == problem]
                kept = [group[i] for i in resample_on_correct([one.summary for one in group], ALGORITHM, rng)]  # G
                rewards = [one.summary.reward for one in kept]
                if rewards_differ(rewards):
                    rows += zip(kept, group_advantages(rewards, deviation="population"), strict=True)  # Eq. 7
            lengths, groups = [int(one.loss_mask.sum()) for one, _ in rows], [one.problem.id for one, _ in rows]
            weights = token_weights(lengths, groups, "group")
            for (one, advantage), weight in zip(rows, weights, strict=True):
                old_N = torch.from_numpy(one.rollout_logprobs[one.loss_mask])
                advantages_N = torch.full_like(old_N, advantage)
                now_N = sampled_logprobs(model, one)
                surrogate = clipped_surrogate(now_N, old_N, advantages_N, clip_low=0.2, clip_high=0.28)  # Eq. 6
                (-weight * surrogate.objective_N.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rewards_seen.append(float(np.mean([one.summary.reward for one in finished])))
            print(f"step {step + 1}/{steps}: reward {rewards_seen[-1]:.3f}, trained {len(rows)} of {len(finished)}")
    return rewards_seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model that calls the tool")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4, help="per step")
    options = parser.parse_args()
    asyncio.run(train(options.model, options.steps, options.prompts))
