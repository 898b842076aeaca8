"""Small models made from configs, and tasks of token sequences, for tests of the integrations."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 32
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip
ENDS = {"bos_token_id": 1, "eos_token_id": 1}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(**settings):
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    calm = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **calm, **ENDS, **settings}))


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, **ENDS))


def classifier(**settings):
    return BertForSequenceClassification(BertConfig(**SIZES, **CALM, **settings))


def tagger():
    return BertForTokenClassification(BertConfig(**SIZES, **CALM, num_labels=4))


def t5():
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def with_lora(model, target):
    from peft import LoraConfig, get_peft_model

    ours = {"fan_in_fan_out": "c_attn" in target, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(r=2, target_modules=target, **ours))


def sequences(n, shift, seed=0, shortest=5, longest=9):
    """Sequences in which each token is the last one plus `shift`: lists of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (n,), generator=generator)
    starts = torch.randint(2, VOCABULARY, (n,), generator=generator)
    found = []
    for length, start in zip(lengths.tolist(), starts.tolist(), strict=True):
        ids = [2 + (start - 2 + i * shift) % (VOCABULARY - 2) for i in range(length)]
        found.append({"input_ids": ids})
    return found


def padded(examples):
    """A data collator: pads with 0, labels with −100."""
    longest = max(len(one["input_ids"]) for one in examples)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for one in examples:
        ids = [*one["input_ids"]]
        more = longest - len(ids)
        batch["input_ids"].append(ids + [0] * more)
        batch["attention_mask"].append([1] * len(ids) + [0] * more)
        labels = one.get("labels", ids)
        batch["labels"].append(labels if isinstance(labels, int) else labels + [-100] * more)
    return {name: torch.tensor(values) for name, values in batch.items()}
