"""Row lengths: what a mean and a maximum, or a tokenised dataset, make of a batch."""

import json
import random
from collections import Counter
from pathlib import Path
from statistics import mean, median

import pytest

from launcher.artifacts import lengths
from launcher.artifacts.lengths import Lengths
from launcher.errors import InvalidConfig, UsageError


def draw(count: int) -> list[int]:
    """Lengths as the measured runs had them: 302 on average, deviation 163, 1,104 at most."""
    chance = random.Random(0)
    drawn = []
    for _ in range(count):
        drawn.append(min(1104, max(40, int(chance.lognormvariate(5.57, 0.55)))))
    return drawn


def count_lengths(pool: list[int]) -> Lengths:
    return lengths._summarise_counts(Counter(pool), "", None)


POOL = draw(4000)
# the lengths themselves, and what a user says of them
SEEN = count_lengths(POOL)
SAID = lengths.parse(f"{sum(POOL) / len(POOL):.1f}:{max(POOL)}")
BOTH = pytest.mark.parametrize("rows", [SEEN, SAID], ids=["seen", "said"])


def test_row_tokens() -> None:
    rows = lengths.parse("290:1100")
    assert rows.mean == 290.0
    assert rows.longest == 1100
    assert rows.rows is None
    same = lengths.parse("512")
    assert same.mean == 512.0
    assert same.longest == 512
    assert same.deviation == 0.0
    for packed in (True, False):
        assert lengths.find_largest_batch(same, rows=4, batches=9, packed=packed).tokens == 2048


@pytest.mark.parametrize("text", ["x", "0:5", "10:5", "nan:5", "1e400:2"])
def test_row_tokens_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        lengths.parse(text)
    assert caught.value.findings[0].code == "row-tokens"


def test_rows_are_cut_at_the_longest_that_is_trained() -> None:
    cut = count_lengths([10, 20, 30, 40]).cut(25)
    assert cut.counts == ((10, 1), (20, 1), (25, 2))
    assert cut.mean == 20.0
    assert lengths.parse("300:4096").cut(2048).longest == 2048
    assert lengths.parse("300:4096").cut(None).longest == 4096


@BOTH
def test_a_batch_on_average_is_that_of_a_draw(rows: Lengths) -> None:
    chance = random.Random(2)
    widths = [max(chance.sample(POOL, 8)) for _ in range(2000)]
    padded = lengths.find_typical_batch(rows, rows=8, packed=False)
    assert padded.width == pytest.approx(mean(widths), rel=0.08)
    packed = lengths.find_typical_batch(rows, rows=8, packed=True)
    assert packed.tokens == pytest.approx(8 * 302, rel=0.03)


@BOTH
@pytest.mark.parametrize("per_batch, batches", [(1, 10), (8, 30)])
def test_the_largest_batch_is_that_of_a_draw(rows: Lengths, per_batch: int, batches: int) -> None:
    chance = random.Random(1)
    largest_widths = []
    largest_sums = []
    for _ in range(301):
        drawn = [chance.sample(POOL, per_batch) for _ in range(batches)]
        largest_widths.append(max(max(batch) for batch in drawn))
        largest_sums.append(max(sum(batch) for batch in drawn))

    padded = lengths.find_largest_batch(rows, rows=per_batch, batches=batches, packed=False)
    expected = per_batch * median(largest_widths)
    tolerance = 0.12 if rows is SAID else 0.05
    assert padded.tokens == pytest.approx(expected, rel=tolerance)
    assert padded.real <= padded.tokens
    packed = lengths.find_largest_batch(rows, rows=per_batch, batches=batches, packed=True)
    assert packed.tokens == pytest.approx(median(largest_sums), rel=0.06)
    assert packed.rows == 1
    assert packed.real == packed.tokens


@pytest.mark.parametrize("text", ["300:1100", "4000:100000"])
@pytest.mark.parametrize("share", [0.05, 0.8])
def test_assumed_rows_are_cut_like_those_that_were_seen(text: str, share: float) -> None:
    assumed = lengths.parse(text)
    seen = assumed.quantiles((n + 0.5) / 4000 for n in range(4000))
    limit = int(share * assumed.longest)
    cut_seen = count_lengths([min(length, limit) for length in seen])
    cut = assumed.cut(limit)
    # what an assumed tail has beyond its maximum is shared out over all
    assert cut.mean == pytest.approx(cut_seen.mean, rel=0.05)
    assert cut.deviation == pytest.approx(cut_seen.deviation, rel=0.12, abs=1)
    assert cut.longest == limit


def median_of(rows: Lengths) -> int:
    (length,) = rows.quantiles([0.5])
    return length


@pytest.mark.parametrize("text", ["300:1100", "4000:100000"])
@pytest.mark.parametrize("share", [0.05, 0.8])
def test_assumed_rows_that_are_cut_keep_what_is_short(text: str, share: float) -> None:
    rows = lengths.parse(text)
    limit = int(share * rows.longest)
    cut = rows.cut(limit)
    assert median_of(cut) == min(limit, median_of(rows))
    cut_again = cut.cut(limit // 2)
    assert cut_again.mean == pytest.approx(rows.cut(limit // 2).mean)
    hardly_cut = rows.cut(rows.longest - 1)
    assert hardly_cut.mean == pytest.approx(rows.mean, rel=0.01)


DATA_FILE = "data-00000-of-00001.arrow"


def write_dataset(folder: Path, columns: dict[str, list[list[int]]]) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table(columns)
    path = folder / DATA_FILE
    with arrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=3)


def test_dpo_has_two_sequences_a_row(tmp_path: Path) -> None:
    write_dataset(tmp_path, {"chosen_input_ids": [[1] * 4], "rejected_input_ids": [[1] * 6]})
    state = {"_data_files": [{"filename": DATA_FILE}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    pairs = lengths.measure_lengths(tmp_path, pairs=True)
    assert pairs.rows == 1
    assert pairs.mean == 5.0
    assert pairs.longest == 6


@pytest.mark.parametrize("fault", ["nothing", "broken", "column", "rows"])
def test_a_folder_without_tokenised_rows(tmp_path: Path, fault: str) -> None:
    pytest.importorskip("pyarrow")
    if fault == "broken":
        (tmp_path / "a.arrow").write_bytes(b"no arrow at all")
    elif fault == "column":
        write_dataset(tmp_path, {"text": [[1]]})
    elif fault == "rows":
        write_dataset(tmp_path, {"input_ids": []})
    folder = tmp_path / "absent" if fault == "nothing" else tmp_path
    with pytest.raises(InvalidConfig) as caught:
        lengths.measure_lengths(folder)
    (finding,) = caught.value.findings
    assert finding.code == "unknown-lengths"
    assert "--row-tokens" in str(finding.help)
