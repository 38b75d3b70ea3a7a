"""Writes golden/methods.json anew: ``python tests/regenerate_golden.py --overwrite``.

Only where the results of a method are meant to change; say why in the commit. Without the word it tells what
would change and writes nothing.
"""

import json
import sys

from golden_methods import CASES, FILE, run


def main() -> None:
    before = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    found = {case: run(case) for case in CASES}
    changed = 0
    for case in sorted({*before, *found}):
        old, new = before.get(case), found.get(case)
        if old is None or new is None:
            print(f"{case}: {'new' if old is None else 'gone'}")
            changed += 1
            continue
        farthest = max(abs(a - b) for name in new for a, b in zip(old[name], new[name], strict=True))
        if farthest > 1e-9:
            print(f"{case}: differs by up to {farthest:.2e}")
            changed += 1
    if "--overwrite" not in sys.argv[1:]:
        print(f"{changed} of {len(found)} changed; nothing written: add --overwrite if that is meant")
        return
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{changed} of {len(found)} changed; written: {FILE}")


if __name__ == "__main__":
    main()
