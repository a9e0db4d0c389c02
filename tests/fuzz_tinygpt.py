"""Damage .tinygpt files at random for as long as asked: python tests/fuzz_tinygpt.py --count 10000

Stops at the first that neither loads soundly nor gives one TinyGPTError, and prints its seed.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "tinygpt"))
from test_tinygpt_mutations import MODELS, attempt, mutate

from conftest import random_weights
from mlx_kivi.tinygpt.format import DTYPES, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="Files to try. Default: 1000.")
    parser.add_argument("--seed", type=int, default=0, help="The first one's seed. Default: 0.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "fuzz.tinygpt"
        sound = []
        for config in MODELS.values():
            for dtype in DTYPES:
                write(path, config, random_weights(config), dtype=dtype)
                sound.append(path.read_bytes())
        refused = 0
        for seed in range(args.seed, args.seed + args.count):
            rng = random.Random(seed)
            path.write_bytes(mutate(rng, rng.choice(sound)))
            try:
                refused += attempt(path) is not None
            except Exception:
                print(f"seed {seed}:", file=sys.stderr)
                raise
    print(
        f"{args.count} files: {refused} refused, {args.count - refused} loaded with finite weights"
    )


if __name__ == "__main__":
    main()
