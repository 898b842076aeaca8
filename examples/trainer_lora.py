"""Hugging Face's Trainer and LoRA: a small language model counts in Greek, German, then French."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from gradmem.integrations.transformers import GEMTrainer

WORDS = {"greek": "ena dyo tria", "german": "eins zwei drei", "french": "un deux trois"}
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def texts(words, n):
    drawn = [" ".join(words.split()[i] for i in row) for row in torch.randint(3, (n, 12))]
    ids = [torch.tensor([*text.encode()][:32]) for text in drawn]
    return [{"input_ids": one, "labels": one} for one in ids]


def main(folder, **settings):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4))
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    train, test = ({name: texts(words, n) for name, words in WORDS.items()} for n in (200, 50))
    args = TrainingArguments(folder, learning_rate=0.01, save_strategy="no", report_to=[])
    trainer = GEMTrainer(model, args, None, train, test, memories=32, **settings)
    trainer.train()
    return trainer.result


if __name__ == "__main__":
    print(f"fine-tuning: {main('out', constrain=None)}\nGEM:         {main('out')}")
