"""The table of tasks: classification, tagging and reading comprehension. A new task is a new row.

Owns where each set is, its columns, splits, label names, licence and official counts; reading them is tasks.py's.
Nothing is read here.
"""

from __future__ import annotations

from oelm.data.sources import DataSet, Hub, Layout


_SENTIMENT = ("negative", "positive")
_NLI = ("entailment", "neutral", "contradiction")
_PAIR = {"text": "premise", "text2": "hypothesis", "label": "label"}
_TEXT = {"text": "text", "label": "label"}
_QA = {"context": "context", "question": "question"}
_WNUT = ("corporation", "creative-work", "group", "location", "person", "product")
_NEWSGROUPS = (
    "alt.atheism",
    "comp.graphics",
    "comp.os.ms-windows.misc",
    "comp.sys.ibm.pc.hardware",
    "comp.sys.mac.hardware",
    "comp.windows.x",
    "misc.forsale",
    "rec.autos",
    "rec.motorcycles",
    "rec.sport.baseball",
    "rec.sport.hockey",
    "sci.crypt",
    "sci.electronics",
    "sci.med",
    "sci.space",
    "soc.religion.christian",
    "talk.politics.guns",
    "talk.politics.mideast",
    "talk.politics.misc",
    "talk.religion.misc",
)
# Where the hub keeps the tables of data sets that were scripts. There is no card there, so no configuration has a name.
_PARQUET = "refs/convert/parquet"
_TRAIN_TEST = {"train": "train", "test": "test"}


def _files(**patterns: str) -> dict[str, tuple[str, ...]]:
    return {split: (pattern,) for split, pattern in patterns.items()}


TASKS: dict[str, DataSet] = {
    row.name: row
    for row in (
        DataSet(
            name="imdb",
            kind="classify",
            title="IMDB reviews, aclImdb v1 (Maas et al. 2011)",
            licence="none stated; research use, cite the paper",
            layouts=(Layout(files=_files(train="imdb/train.parquet", test="imdb/test.parquet"), columns=_TEXT),),
            hub=Hub(id="stanfordnlp/imdb", config="plain_text", splits=_TRAIN_TEST, columns=_TEXT),
            official={"train": 25_000, "test": 25_000},
            labels=_SENTIMENT,
            carve={"validation": 0.1},
        ),
        DataSet(
            name="ag-news",
            kind="classify",
            title="AG News, four topics (Zhang et al. 2015)",
            licence="non-commercial research use",
            layouts=(
                Layout(files=_files(train="ag_news/train.parquet", test="ag_news/test.parquet"), columns=_TEXT),
                Layout(
                    files=_files(train="ag_news/train-subset.parquet", test="ag_news/test.parquet"),
                    columns=_TEXT,
                    partial=True,
                    note="train is a part of the official one, from several copies, in part re-tokenised",
                ),
            ),
            hub=Hub(id="fancyzhx/ag_news", splits=_TRAIN_TEST, columns=_TEXT),
            official={"train": 120_000, "test": 7_600},
            labels=("World", "Sports", "Business", "Sci/Tech"),
            carve={"validation": 0.05},
        ),
        DataSet(
            name="xnli-en",
            kind="classify",
            title="XNLI, English (Conneau et al. 2018)",
            licence="CC BY-NC 4.0; train is MultiNLI's, under its own terms",
            layouts=(
                Layout(
                    files=_files(
                        train="nli/mnli-taxinli-subset.parquet",
                        validation="nli/xnli-en-validation.parquet",
                        test="nli/xnli-en-test.parquet",
                    ),
                    columns=_PAIR,
                    only={"train": ("mnli_split", "train")},
                    partial=True,
                    note="train is the part of MultiNLI that TaxiNLI (C-UDA 1.0) holds",
                ),
            ),
            hub=Hub(id="facebook/xnli", config="en", columns=_PAIR),
            official={"train": 392_702, "validation": 2_490, "test": 5_010},
            labels=_NLI,
            note="the official English train split is MultiNLI's",
        ),
        DataSet(
            name="sst2",
            kind="classify",
            title="SST-2 in the form of GLUE (Socher et al. 2013; Wang et al. 2018)",
            licence="none stated",
            layouts=(
                Layout(
                    files=_files(
                        train="sst2/glue-train.parquet",
                        validation="sst2/glue-validation.parquet",
                        test="sst2/sentences-test.parquet",
                    ),
                    columns=_TEXT,
                ),
            ),
            hub=Hub(
                id="nyu-mll/glue",
                config="sst2",
                splits={"train": "train", "validation": "validation"},
                columns={"text": "sentence", "label": "label"},
            ),
            official={"train": 67_349, "validation": 872, "test": 1_821},
            labels=_SENTIMENT,
            note="train holds phrases of the training sentences; GLUE hides its test labels, so test is the 1,821 whole "
            "sentences of the Treebank's own test split",
        ),
        DataSet(
            name="mnli",
            kind="classify",
            title="MultiNLI in the form of GLUE (Williams et al. 2018)",
            licence="mixed, mostly OANC; see the paper",
            layouts=(
                Layout(
                    files=_files(train="nli/mnli-taxinli-subset.parquet", test="nli/mnli-taxinli-subset.parquet"),
                    columns=_PAIR,
                    only={"train": ("mnli_split", "train"), "test": ("mnli_split", "dev_matched")},
                    partial=True,
                    note="the part of MultiNLI that TaxiNLI (C-UDA 1.0) holds",
                ),
            ),
            hub=Hub(
                id="nyu-mll/glue",
                config="mnli",
                splits={"train": "train", "test": "validation_matched"},
                columns=_PAIR,
            ),
            official={"train": 392_702, "test": 9_815},
            labels=_NLI,
            carve={"validation": 0.02},
            note="GLUE hides the test labels: test is the official matched development split, read once; validation is "
            "carved from train by premise",
        ),
        DataSet(
            name="snli",
            kind="classify",
            title="SNLI (Bowman et al. 2015)",
            licence="CC BY-SA 4.0",
            layouts=(
                Layout(
                    files=_files(train="nli/snli-subset-train.parquet", test="nli/snli-subset-test.parquet"),
                    columns=_PAIR,
                    partial=True,
                    note="20,000 rows with a split that is not the official one: some premises of test occur in train",
                ),
            ),
            hub=Hub(id="stanfordnlp/snli", config="plain_text", columns=_PAIR),
            official={"train": 550_152, "validation": 10_000, "test": 10_000},
            labels=_NLI,
            carve={"validation": 0.02},
            note="rows without a gold label (-1) are left out",
        ),
        DataSet(
            name="trec",
            kind="classify",
            title="TREC question classification, six classes (Li and Roth 2002)",
            licence="none stated (UIUC)",
            layouts=(Layout(files=_files(train="trec/train.parquet", test="trec/test.parquet"), columns=_TEXT),),
            hub=Hub(
                id="CogComp/trec",
                revision=_PARQUET,
                splits=_TRAIN_TEST,
                columns={"text": "text", "label": "coarse_label"},
            ),
            official={"train": 5_452, "test": 500},
            labels=("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"),
            carve={"validation": 0.1},
        ),
        DataSet(
            name="20newsgroups",
            kind="classify",
            title="20 Newsgroups, split by date (Lang 1995)",
            licence="none stated (public Usenet posts)",
            layouts=(
                Layout(
                    files=_files(train="20newsgroups/train.parquet", test="20newsgroups/test.parquet"),
                    columns=_TEXT,
                    note="headers, quotes and footers are kept: they give the topic away",
                ),
            ),
            hub=Hub(
                id="SetFit/20_newsgroups",
                splits=_TRAIN_TEST,
                columns=_TEXT,
                note="headers, quotes and footers are removed: numbers do not compare with the whole posts",
            ),
            official={"train": 11_314, "test": 7_532},
            labels=_NEWSGROUPS,
            carve={"validation": 0.1},
        ),
        DataSet(
            name="wnut17",
            kind="tag",
            title="WNUT-17 emerging entities (Derczynski et al. 2017)",
            licence="CC BY 4.0",
            layouts=(
                Layout(
                    files=_files(
                        train="wnut17/train.parquet",
                        validation="wnut17/validation.parquet",
                        test="wnut17/test.parquet",
                    ),
                    columns={"tokens": "tokens", "tags": "tags"},
                ),
            ),
            hub=Hub(
                id="leondz/wnut_17",
                revision=_PARQUET,
                columns={"tokens": "tokens", "tags": "ner_tags"},
            ),
            official={"train": 3_394, "validation": 1_009, "test": 1_287},
            labels=("O", *(f"{prefix}-{kind}" for kind in _WNUT for prefix in "BI")),
        ),
        DataSet(
            name="squad",
            kind="qa",
            title="SQuAD v1.1 (Rajpurkar et al. 2016)",
            licence="CC BY-SA 4.0",
            layouts=(
                Layout(
                    files=_files(train="squad/squad-v1.1-train.parquet", test="squad/squad-v1.1-dev.parquet"),
                    columns=_QA
                    | {
                        "answers": "answer_text",
                        "starts": "answer_start",
                        "id": "id",
                        "title": "title",
                        "ambiguous": "ambiguous_start",
                    },
                    partial=True,
                    note="read back from the explorer pages; training questions whose answer occurs more than once in "
                    "its context are left out, as the true place is not known",
                ),
            ),
            hub=Hub(
                id="rajpurkar/squad",
                config="plain_text",
                splits={"train": "train", "test": "validation"},
                columns=_QA | {"answers": "answers", "id": "id", "title": "title"},
            ),
            official={"train": 87_599, "test": 10_570},
            optional=("id", "title", "starts", "ambiguous"),
            carve={"validation": 0.05},
            note="the official test is hidden: test is the official development split, read once; validation is carved "
            "from train by article",
        ),
    )
}

# Where a split comes from when the first place does not have it.
ELSEWHERE: dict[str, DataSet] = {
    "sst2": DataSet(
        name="sst2",
        kind="classify",
        title="SST-2, whole sentences: the test split with labels",
        licence="none stated",
        hub=Hub(id="SetFit/sst2", splits={"test": "test"}, columns=_TEXT),
    )
}

# What the hub's numbers mean, where that is not our order.
HUB_ORDER: dict[str, tuple[str, ...]] = {"trec": ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM")}

# The number that stands for "no label".
UNLABELLED: dict[str, int] = {"snli": -1}
