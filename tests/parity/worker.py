"""One rank of a parity layout: runs every case of that layout in order and writes what happened to each.

    python tests/parity/worker.py LAYOUT RANK PORT FOLDER

Result file ``FOLDER/LAYOUT.RANK.json``: {case: "" | traceback}, rewritten after each case, so that a killed worker
leaves what it did. After a failure the remaining cases of a multi-rank layout are not run: its collectives no longer
match."""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import torch  # noqa: E402

from areal_dta.engine import init_process_group  # noqa: E402
from tests.parity.layouts import LAYOUTS  # noqa: E402
from tests.parity.support import Context, worst_errors, write_models  # noqa: E402

COLLECTIVE_TIMEOUT_S = 60.0


def main(layout: str, rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    sizes, cases = LAYOUTS[layout]
    if layout == "losses":
        from tests.parity import cases_losses

        cases = cases_losses.CASES
    if layout == "single":
        write_models(folder)
    init_process_group(rank, sizes.world_size, "127.0.0.1", port, timeout_s=COLLECTIVE_TIMEOUT_S)
    context = Context(rank, sizes, folder)
    results: dict[str, str] = {}
    for case in cases:
        began, began_cpu = time.perf_counter(), time.process_time()
        try:
            case(context)
            results[case.__name__] = ""
        except Exception:  # noqa: BLE001  a case's failure is its result
            results[case.__name__] = traceback.format_exc()
        worst = ", ".join(f"{error:.1e} of {bound:.0e}" for bound, error in sorted(worst_errors.items()))
        times = f"{time.perf_counter() - began:.2f} s, {time.process_time() - began_cpu:.2f} s of CPU"
        outcome = f"{'failed' if results[case.__name__] else 'ok'} in {times}"
        print(f"{case.__name__}: {outcome}{worst and f', worst error {worst}'}", flush=True)
        worst_errors.clear()
        (folder / f"{layout}.{rank}.json").write_text(json.dumps(results))
        if results[case.__name__] and sizes.world_size > 1:
            break
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
