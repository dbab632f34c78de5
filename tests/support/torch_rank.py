"""One of two ranks of a torch process group, which prints the keys that its DataLoader gives.

python tests/support/torch_rank.py FILE RANK fork|spawn
"""

import sys

import torch.distributed
from small_frames import lazy_frame, small_frame


def main(file: str, rank: str, context: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=int(rank), world_size=2
    )
    numbers = iter(range(100))
    parts = [[next(numbers) for _ in range(size)] for size in (5, 3, 0, 8, 1, 4, 2)]
    ddf = lazy_frame([small_frame(rows) for rows in parts])
    workers = 2 if context == "fork" else 1
    loader = ddf.images.dataloader(
        3, shuffle=1, num_workers=workers, multiprocessing_context=context
    )
    print(*(int(key) for batch in loader for key in batch["key"]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
