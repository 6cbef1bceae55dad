"""How much of a task the frozen encoder gives away by itself: logistic regression on its [CLS] vectors."""

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from peft import PeftModel
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding


@torch.no_grad()
def cls_vectors(model: PeftModel, data: Dataset, collator: DataCollatorWithPadding) -> NDArray[np.float32]:
    """The encoder's last hidden state at the first token, adapters off: (rows of data, hidden size)."""
    model.eval()
    encoder = model.get_base_model().base_model
    inputs = data.select_columns([name for name in collator.tokenizer.model_input_names if name in data.column_names])
    with model.disable_adapter():
        batches = [
            encoder(**batch.to(model.device)).last_hidden_state[:, 0].float().cpu()
            for batch in DataLoader(inputs, batch_size=64, collate_fn=collator)
        ]
    return torch.cat(batches).numpy()


def probe(model: PeftModel, train: Dataset, test: Dataset, collator: DataCollatorWithPadding) -> NDArray[np.int64]:
    """Fits the probe on the tokenized split `train` and returns its classes for the rows of `test`."""
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    classifier.fit(cls_vectors(model, train, collator), train["label"])
    return classifier.predict(cls_vectors(model, test, collator))
