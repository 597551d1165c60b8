"""Samples for a model of transformers: ragged, with ignored labels, as its forward takes them."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from benchmarks.model_losses.small import SPECIAL, WORDS

SIZES = (3, 1, 2, 2, 1, 3)
"""Samples of the micro-batches of the window."""

OUTSIDE = 60
"""The place of an answer that lies outside of every text."""

_MAIN = ("input_ids", "pixel_values", "input_values", "input_features", "past_values")


class Samples:
    """Draws samples for a class."""

    def __init__(self, kind: type[PreTrainedModel], config: PretrainedConfig) -> None:
        self.name = kind.__name__
        self.config = config
        self.takes = inspect.signature(kind.forward).parameters
        main = kind.main_input_name
        self.main = main if main in self.takes else next(m for m in _MAIN if m in self.takes)
        self.drawn = torch.Generator().manual_seed(0)

    def find(self, *names: str, default: Any = None) -> Any:
        """Return the first setting of one of these names, of the model or of a part of it."""
        parts = [p for p in vars(self.config).values() if isinstance(p, PretrainedConfig)]
        for name in names:
            for part in (self.config, *parts):
                if isinstance(value := getattr(part, name, None), int | list | tuple):
                    return value
        return default

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Return whole numbers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.drawn)

    def real(self, *shape: int) -> Tensor:
        """Return normal numbers."""
        return torch.randn(shape, generator=self.drawn, dtype=torch.float64)

    def part(self, labels: Tensor, ignored: int = -100) -> Tensor:
        """Return labels of which some are to be ignored, more or fewer in each sample."""
        rate = torch.rand((), generator=self.drawn)
        left_out = torch.rand(labels.shape, generator=self.drawn) < 0.8 * rate
        left_out.view(-1)[0] = False
        return labels.masked_fill(left_out, ignored)

    def draw(self, number: int) -> dict[str, Any]:
        """Return one sample."""
        sample = self._inputs()
        length = len(sample.get("input_ids", ())) or 8
        if "start_positions" in self.takes and "input_ids" in sample:
            inside = number % 3 > 0
            for name in ("start_positions", "end_positions"):
                sample[name] = self.whole(0, length) if inside else torch.tensor(OUTSIDE)
        for name in ("next_sentence_label", "sentence_order_label"):
            if name in self.takes:
                sample[name] = self.whole(0, 2)
        if "bool_masked_pos" in self.takes:
            side = self.size // self.find("patch_size", default=8)
            sample["bool_masked_pos"] = self.part(torch.ones(side**2, dtype=torch.long), 0).bool()
        if "noise" in self.takes and "pixel_values" in sample:
            sample["noise"] = self.real((self.size // self.find("patch_size", default=8)) ** 2)
        if "mask_labels" in self.takes:
            many = 1 + number % 2
            sample["mask_labels"] = self.whole(0, 2, many, self.size, self.size).double()
            sample["class_labels"] = torch.arange(many)
        if "labels" in self.takes and "next_sentence_label" not in sample:
            self._label(sample, number, length)
        elif "labels" in self.takes and "ForPreTraining" in self.name:
            sample["labels"] = self.part(sample["input_ids"])
        return sample

    @property
    def size(self) -> int:
        """Width of an image."""
        size = self.find("image_size", default=64)
        return size if isinstance(size, int) else size[0]

    def _inputs(self) -> dict[str, Any]:
        length = int(self.whole(6, 14))
        sample: dict[str, Any] = {}
        if self.main == "past_values":
            return self._series()
        image = (int(self.find("num_channels", "in_channels", default=3)), self.size, self.size)
        frames = self.find("num_frames", "frames_per_clip", default=2)
        required = [n for n, p in self.takes.items() if p.default is inspect.Parameter.empty]
        if self.main == "input_ids" or "input_ids" in required or "Text" in self.name:
            words = self.find("vocab_size", default=WORDS)
            sample["input_ids"] = self.whole(5, min(words, WORDS) - SPECIAL - 5, length)
            end = getattr(self.config, "eos_token_id", None)
            if self.config.is_encoder_decoder and isinstance(end, int):
                sample["input_ids"][-1] = end
            if "PaliGemma" in self.name:  # which words are to be said
                sample["token_type_ids"] = (torch.arange(length) >= length // 2).long()
            if "bbox" in self.takes:
                sample["bbox"] = self.whole(0, 9, length, 4).sort(-1).values
        if self.main == "pixel_values" or "pixel_values" in required:
            has_frames = self.main != "input_ids" and self.find("num_frames")
            is_video = "Video" in self.name or has_frames
            sample["pixel_values"] = self.real(*((frames,) if is_video else ()), *image)
        if self.main == "pixel_values_videos":
            sample[self.main] = self.real(frames, *image)
        if self.main == "input_values":
            sample[self.main] = self.real(1200 + 80 * length)
        if self.main == "input_features":
            names = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel")
            sample[self.main] = self.real(8 * length, self.find(*names, default=80))
        if "attention_mask" in self.takes and self.main in sample:
            sample["attention_mask"] = torch.ones(len(sample[self.main]), dtype=torch.long)
        return sample

    def _series(self) -> dict[str, Any]:
        config = self.config
        many = () if "past_time_features" in self.takes else (self.find("num_input_channels") or 1,)
        past = self.find("context_length", default=16)
        if not many:
            past += max(self.find("lags_sequence", default=[0]))
        sample = {"past_values": self.real(past, *many)}
        future = self.find("prediction_length", default=4)
        if "future_values" in self.takes:
            sample["future_values"] = self.real(future, *many)
        if "target_values" in self.takes:
            is_class = "Classification" in self.name
            shape = () if is_class else (self.find("num_targets", default=1),)
            sample["target_values"] = self.whole(0, 2) if is_class else self.real(*shape)
        if "past_time_features" in self.takes:
            of = getattr(config, "num_time_features", 0)
            sample["past_time_features"] = self.real(past, of)
            sample["future_time_features"] = self.real(future, of)
            sample["past_observed_mask"] = torch.ones(past)
        return sample

    def _label(self, sample: dict[str, Any], number: int, length: int) -> None:
        name, classes = self.name, int(self.config.num_labels or 2)
        many = 1 + number % 3
        if "ForMultipleChoice" in name:
            for key in ("input_ids", "attention_mask", "bbox"):
                if key in sample:
                    sample[key] = torch.stack([sample[key], sample[key].flip(0)])
            sample["labels"] = self.whole(0, 2)
        elif "ForTokenClassification" in name:
            sample["labels"] = self.part(self.whole(0, classes, length))
        elif re.search("(Electra|Funnel)ForPreTraining", name):
            sample["labels"] = self.part(self.whole(0, 2, length))
        elif re.search("ObjectDetection|ForSegmentation|InstanceSegmentation", name):
            sample["labels"] = {
                "class_labels": self.whole(0, classes, many),
                "boxes": 0.2 + 0.4 * torch.rand(many, 4, generator=self.drawn).double(),
                "masks": self.whole(0, 2, many, self.size, self.size).double(),
            }
        elif "SemanticSegmentation" in name:
            sample["labels"] = self.part(self.whole(0, classes, self.size, self.size), 255)
        elif "ForCTC" in name:
            sample["labels"] = self.whole(1, 20, 1 + many)
        elif re.search("Classification|XVector|Regression|NextSentence", name):
            sample["labels"] = self.whole(0, classes)
        elif "QuestionAnswering" in name and self.main != "input_ids":
            sample["labels"] = torch.rand(classes, generator=self.drawn).double()
        elif self.config.is_encoder_decoder or "input_ids" not in sample:
            sample["labels"] = self.part(self.whole(5, WORDS - SPECIAL - 5, 4 + length // 2))
        else:
            sample["labels"] = self.part(sample["input_ids"])


def widths(samples: list[dict[str, Any]]) -> dict[str, int]:
    """Return the length of each entry in the longest of the samples."""
    longest: dict[str, int] = {}
    for sample in samples:
        for name, value in sample.items():
            if isinstance(value, Tensor) and value.dim():
                length = value.shape[_axis(name, value)]
                longest[name] = max(longest.get(name, 0), length)
    return longest


def collate(samples: list[dict[str, Any]], lengths: Mapping[str, int] | None = None) -> Any:
    """Return a batch, filled up to `lengths`, or to its own longest entries."""
    lengths = lengths or widths(samples)
    batch: dict[str, Any] = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        if isinstance(first, dict) or name in ("mask_labels", "class_labels"):
            batch[name] = values
            continue
        batch[name] = torch.stack([_filled(name, value, lengths) for value in values])
    return batch


def _axis(name: str, value: Tensor) -> int:
    """Return which dimension is the length; the first is the choice of a multiple choice."""
    of_choices = {"input_ids": 2, "attention_mask": 2, "bbox": 3}
    return int(value.dim() == of_choices.get(name))


def _filled(name: str, value: Tensor, lengths: Mapping[str, int]) -> Tensor:
    if not value.dim():
        return value
    axis, shape = _axis(name, value), list(value.shape)
    shape[axis] = lengths[name] - shape[axis]
    filling = value.new_full(shape, -100 if name == "labels" else 0)
    return torch.cat([value, filling], axis)
