"""Row lengths: what a mean and a maximum, or a tokenised dataset, make of a batch."""

import json
import random
from pathlib import Path

import pytest

from launcher.artifacts import lengths
from launcher.errors import InvalidConfig, UsageError


@pytest.mark.parametrize("text", ["x", "0:5", "10:5", "nan:5", "1e400:2"])
def test_row_tokens_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        lengths.parse(text)
    assert caught.value.findings[0].code == "row-tokens"


def test_row_tokens() -> None:
    rows = lengths.parse("290:1100")
    assert (rows.mean, rows.longest, rows.rows) == (290.0, 1100, None)
    same = lengths.parse("512")
    assert (same.mean, same.longest, same.deviation) == (512.0, 512, 0.0)
    assert lengths.largest(same, rows=4, batches=9, packed=True).tokens == 2048
    assert lengths.largest(same, rows=4, batches=9, packed=False).tokens == 2048
    # rows are cut at the longest that is trained
    cut = counted([10, 20, 30, 40]).cut(25)
    assert cut.counts == ((10, 1), (20, 1), (25, 2)) and cut.mean == 20.0
    assert lengths.parse("300:4096").cut(2048).longest == 2048
    assert lengths.parse("300:4096").cut(None).longest == 4096
    # a batch on average
    pool = drawn(4000)
    rng = random.Random(2)
    widths = [max(rng.sample(pool, 8)) for _ in range(2000)]
    for known in (counted(pool), lengths.parse(f"302:{max(pool)}")):
        one = lengths.typical(known, rows=8, packed=False)
        assert one.width == pytest.approx(sum(widths) / len(widths), rel=0.08)
        assert lengths.typical(known, rows=8, packed=True).tokens == pytest.approx(
            8 * 302, rel=0.03
        )


def drawn(count: int) -> list[int]:
    """Lengths as the measured runs had them: 302 on average, 163 of deviation, 1,104 at most."""
    rng = random.Random(0)
    found = []
    while len(found) < count:
        found.append(min(1104, max(40, int(rng.lognormvariate(5.57, 0.55)))))
    return found


@pytest.mark.parametrize(("rows", "batches"), [(1, 10), (8, 30)])
def test_largest_batches_are_those_of_a_draw(rows: int, batches: int) -> None:
    rng = random.Random(1)
    pool = drawn(4000)
    wide, packed = [], []
    for _ in range(300):
        micro = [rng.sample(pool, rows) for _ in range(batches)]
        wide.append(rows * max(max(m) for m in micro))
        packed.append(max(sum(m) for m in micro))
    wide.sort()
    packed.sort()
    given = lengths.parse(f"{sum(pool) / len(pool):.1f}:{max(pool)}")
    for known in (given, counted(pool)):
        padded = lengths.largest(known, rows=rows, batches=batches, packed=False)
        assert padded.tokens == pytest.approx(wide[150], rel=0.12 if known is given else 0.05)
        flat = lengths.largest(known, rows=rows, batches=batches, packed=True)
        assert flat.tokens == pytest.approx(packed[150], rel=0.06)
        assert flat.rows == 1 and flat.real == flat.tokens and padded.real <= padded.tokens


def counted(pool: list[int]) -> lengths.Lengths:
    return lengths._counted({n: pool.count(n) for n in set(pool)}, "", None)


@pytest.mark.parametrize("text", ["300:1100", "4000:100000"])
@pytest.mark.parametrize("share", [0.05, 0.8])
def test_assumed_rows_are_cut_like_those_that_were_seen(text: str, share: float) -> None:
    rows = lengths.parse(text)
    seen = rows.quantiles((n + 0.5) / 4000 for n in range(4000))
    limit = int(share * rows.longest)
    cut, real = rows.cut(limit), counted(seen).cut(limit)
    # what an assumed tail has beyond its maximum is shared out over all
    assert cut.mean == pytest.approx(real.mean, rel=0.05)
    assert cut.deviation == pytest.approx(real.deviation, rel=0.12, abs=1)
    assert cut.longest == limit and cut.quantiles([0.5]) == [min(limit, *rows.quantiles([0.5]))]
    assert cut.cut(limit // 2).mean == pytest.approx(rows.cut(limit // 2).mean)
    assert rows.cut(rows.longest - 1).mean == pytest.approx(rows.mean, rel=0.01)


def saved(folder: Path, columns: dict[str, list[list[int]]]) -> None:
    arrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True, exist_ok=True)
    table = arrow.table(columns)
    with arrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as out:
        out.write_table(table, max_chunksize=3)


def test_dpo_has_two_sequences_a_row(tmp_path: Path) -> None:
    saved(tmp_path, {"chosen_input_ids": [[1] * 4], "rejected_input_ids": [[1] * 6]})
    (tmp_path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    found = lengths.of_dataset(tmp_path, pairs=True)
    assert (found.rows, found.mean, found.longest) == (1, 5.0, 6)


@pytest.mark.parametrize("what", ["nothing", "broken", "column", "rows"])
def test_what_is_no_dataset(tmp_path: Path, what: str) -> None:
    pytest.importorskip("pyarrow")
    folder = tmp_path / "set"
    if what != "nothing":
        folder.mkdir()
    if what == "broken":
        (folder / "a.arrow").write_bytes(b"no arrow at all")
    if what == "column":
        saved(folder, {"text": [[1]]})
    if what == "rows":
        saved(folder, {"input_ids": []})
    with pytest.raises(InvalidConfig) as caught:
        lengths.of_dataset(folder)
    assert caught.value.findings[0].code == "unknown-lengths"
    assert "--row-tokens" in str(caught.value.findings[0].help)
