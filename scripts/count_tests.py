"""Sums JUnit reports and prints `N passed, N failed, N skipped` as the last line.

Usage: count_tests.py STATUS REPORT...   STATUS is 0 when every runner ended well.
Exits 1 when a test failed or a runner did, 0 otherwise.
"""

import sys
import xml.etree.ElementTree as ET


def count(path: str) -> tuple[int, int, int]:
    """Returns (passed, failed, skipped) of one JUnit file."""
    passed = failed = skipped = 0
    for case in ET.parse(path).getroot().iter("testcase"):
        tags = {child.tag for child in case}
        if tags & {"failure", "error"} or case.get("status") == "fail":
            failed += 1
        elif "skipped" in tags or case.get("status") in ("notrun", "disabled"):
            skipped += 1
            print(f"skipped: {case.get('classname')} {case.get('name')}")
        else:
            passed += 1
    return passed, failed, skipped


def main() -> int:
    runner_failed = sys.argv[1] != "0"
    totals = [sum(column) for column in zip(*(count(path) for path in sys.argv[2:]))]
    passed, failed, skipped = totals or (0, 0, 0)
    if runner_failed and failed == 0:
        print("a test runner ended badly without naming a failed test")
        failed = 1
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
