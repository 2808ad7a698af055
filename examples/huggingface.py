"""A GPT-2 of Hugging Face learns Python's reference text character by character; the callback drives its precision.

It needs the extra `text`.
"""

from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import cpt_core as cpt
from cpt_extras.integrations.hf import PrecisionCallback

LENGTH = 64


def pieces():
    """Return pieces of the text to learn from and to test on, and how many characters it has."""
    text = "\n".join(topics.values())
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    numbers = torch.tensor([letters[c] for c in text])
    parts = [
        {"input_ids": part, "labels": part}
        for part in numbers.split(LENGTH)
        if len(part) == LENGTH
    ]
    return parts[:-64], parts[-64:], len(letters)


def main(folder="out", steps=200):
    """Train, and return what the evaluation at 8 bits says."""
    train, test, letters = pieces()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=letters,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = cpt.quantize_(GPT2LMHeadModel(config))
    schedule = cpt.make_schedule("CR", q_min=4, q_max=8, total_steps=steps, n_cycles=2)
    args = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=steps // 4,
        save_steps=steps // 2,
        report_to=[],
        use_cpu=True,
        seed=0,
    )
    callback = PrecisionCallback(schedule)  # the line to add; it logs bits and cost
    trainer = Trainer(
        model, args, train_dataset=train, eval_dataset=test, callbacks=[callback]
    )
    trainer.train()  # resume_from_checkpoint=True goes on in the middle of a cycle
    return trainer.evaluate()  # at q_max


if __name__ == "__main__":
    print(main())
