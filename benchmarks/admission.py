"""The cost of admission with scarce KV blocks: steps and computed tokens of the real scheduler,
without a model.

    python -m benchmarks.admission --seeds 5

Output lengths are drawn; the cache holds a quarter of the slots' requests at their ends. A run
costs its steps and its tokens, and a step as much as so many tokens: 8 on a CPU (4.9 ms and 0.6 ms,
docs/performance.md), 2,048 on a GPU. Policies:

- plain: every request that can begin
- mean: each is expected to be as long as those that ended, on average
- former: the forecast of the commit f323852, relative to plain as measured there
- forecast: the scheduler's own
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.report import arguments, write_report
from benchmarks.simulation import BLOCK_SIZE, SimulatedLine, Simulation
from workers.engine.scheduling.admission import AdmissionPolicy, PlainAdmission
from workers.engine.scheduling.forecast import AdmissionForecast
from workers.engine.scheduling.kv_cache import KVCache
from workers.engine.scheduling.request import RequestState

STEP_COSTS = {"CPU": 4.9 / 0.6, "GPU": 2048.0}  # tokens
SLOTS = 64
ROOM = SLOTS // 4  # requests
LONGEST = 4096
PREFIX = 256  # tokens
LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "memoryless": lambda draw: draw.expovariate(1 / 100),
    "lognormal": lambda draw: draw.lognormvariate(4.4, 0.8),
    "uniform": lambda draw: draw.randint(20, 220),
    "narrow": lambda draw: draw.gauss(120, 12),
    "equal": lambda draw: 120,
}
BATCHES: dict[str, Callable[[random.Random], float]] = {
    "long": lambda draw: 200,
    "varied": LENGTHS["lognormal"],
    "short": lambda draw: draw.expovariate(1 / 20),
}
KINDS = (*LENGTHS, "several batches", "shared prefixes")
# Steps and tokens of the commit f323852 by those of plain admission, five seeds, 600 lines
FORMER = {
    "memoryless": (1.0489, 0.9786),
    "lognormal": (1.0527, 0.9749),
    "uniform": (1.0811, 0.9713),
    "narrow": (1.1356, 0.8915),
    "equal": (1.1316, 0.8446),
    "several batches": (1.1198, 0.9437),
    "shared prefixes": (1.0549, 0.9724),
}
Cost = tuple[float, float]  # steps, tokens


class MeanAdmission(PlainAdmission):
    """Admits requests that fit if each gets as long as the mean of the ended ones."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        self._outputs = [256]

    def has_room(  # type: ignore[override]
        self, request: RequestState, prefix: Sequence[int], step: int, running: Sequence[RequestState], returning: int
    ) -> bool:
        pool = self._kv_cache.pool
        own = sum(other.pages_held - other.shared for other in running)
        shared = max(0, pool.num_blocks - 1 - pool.num_free - returning - own)
        need = sum(self._blocks(other) - other.shared for other in running)
        need += self._blocks(request) - len(prefix) + pool.count_free(prefix)
        return shared + need < pool.num_blocks

    def learn(self, request: RequestState) -> None:  # type: ignore[override]
        self._outputs.append(len(request.tokens) - request.prompt_length)

    def _blocks(self, request: RequestState) -> int:
        end = request.prompt_length + int(sum(self._outputs[-256:]) / len(self._outputs[-256:]))
        return self._kv_cache.pages_for(max(request.known + 1, min(request.limit, end)))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind [default: 5]")
    parser.add_argument("--lines", type=int, default=600, help="of a run [default: 600]")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="of output lengths")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.seeds)
    figures = {kind: figures_of(kind, seeds, args.lines) for kind in args.kinds}
    print(admission_table(figures))
    write_report("admission", figures, args.out, args.seed)


def figures_of(kind: str, seeds: Sequence[int], lines: int = 600) -> dict[str, dict[str, Any]]:
    """Return by machine the policies' costs, relative to the best policy except the last."""
    plain = mean_cost(lambda _: PlainAdmission(), kind, seeds, lines)
    costs = {"plain": plain, "mean": mean_cost(MeanAdmission, kind, seeds, lines)}
    if kind in FORMER:
        steps, tokens = FORMER[kind]
        costs["former"] = (steps * plain[0], tokens * plain[1])
    figures = {}
    for machine, step_cost in STEP_COSTS.items():
        forecast = mean_cost(partial(forecast_at, step_cost), kind, seeds, lines)
        total = {name: step_cost * cost[0] + cost[1] for name, cost in (costs | {"forecast": forecast}).items()}
        best = min(total[name] for name in costs)
        figures[machine] = {name: round(cost / best, 4) for name, cost in total.items()}
    return figures


def mean_cost(admission: Callable[[KVCache], AdmissionPolicy], kind: str, seeds: Sequence[int], lines: int) -> Cost:
    """Return the mean steps and computed tokens of a run."""
    steps = tokens = 0
    for seed in seeds:
        drawn = lines_of(kind, seed, lines)
        blocks = blocks_of(drawn, ROOM, PREFIX if kind == "shared prefixes" else 0)
        report = Simulation(drawn, blocks, slots=SLOTS, depth=1, admission=admission).run()
        steps, tokens = steps + report.steps, tokens + report.computed
    return steps / len(seeds), tokens / len(seeds)


def forecast_at(step_cost: float, kv_cache: KVCache) -> AdmissionForecast:
    policy = AdmissionForecast(kv_cache, LONGEST)
    policy.step_cost_tokens = step_cost
    return policy


def lines_of(kind: str, seed: int, count: int) -> list[SimulatedLine]:
    """Return lines whose prompts have only the shared prefixes in common."""
    draw = random.Random(f"{kind} {seed}")
    prefixes = [draw.choices(range(50_000), k=PREFIX) for _ in range(4)]
    lines = []
    for number in range(count):
        batch_id = draw.choice(list(BATCHES)) if kind == "several batches" else "batch"
        prompt = draw.choices(range(50_000), k=draw.randint(40, 120))
        if kind == "shared prefixes":
            prompt = prefixes[4 * number // count] + prompt
        length = BATCHES.get(batch_id) or LENGTHS.get(kind) or LENGTHS["lognormal"]
        lines.append(SimulatedLine(prompt, min(512, max(1, int(length(draw)))), batch_id=batch_id))
    return lines


def blocks_of(lines: Sequence[SimulatedLine], requests: float, prefix: int = 0) -> int:
    """Return the blocks that `requests` requests take at their ends, with one shared prefix."""
    each = sum(-(-(len(line.prompt) - prefix + line.output) // BLOCK_SIZE) for line in lines) / len(lines)
    return int(each * requests) + prefix // BLOCK_SIZE


def admission_table(figures: dict[str, Any]) -> str:
    """Return a table of costs by machine and policy, relative to the best of the other three."""
    columns = [(machine, policy) for machine in STEP_COSTS for policy in ("plain", "mean", "former", "forecast")]
    rows = [
        [kind, *(f"{figures[kind][machine].get(policy, float('nan')):.3f}" for machine, policy in columns)]
        for kind in figures
    ]
    head = ["output lengths", *(f"{machine}: {policy}" for machine, policy in columns)]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def admission_ranges(figures: dict[str, Any]) -> str:
    """Return the least and the largest of these costs over all kinds, by machine and policy."""
    policies = ("plain", "mean", "forecast")
    rows = [["", *policies], ["---"] * (1 + len(policies))]
    for machine in STEP_COSTS:
        costs = [[kind[machine][policy] for kind in figures.values()] for policy in policies]
        rows.append([machine, *(f"{min(found):.3f} to {max(found):.3f}" for found in costs)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    main()
