//! Settings that are one of several words.

use crate::spec::Choice;
use serde::Serialize;

/// Declares a choice: its values, the words that select each (the first is the usual one) and their meanings.
macro_rules! choice {
    ($(#[doc = $about:literal])+ $type:ident { $(#[doc = $meaning:literal] $value:ident = $($word:literal)|+;)+ }) => {
        $(#[doc = $about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum $type { $(#[doc = $meaning] $value,)+ }

        impl Choice for $type {
            const ALL: &'static [(Self, &'static [&'static str], &'static str)] =
                &[$((Self::$value, &[$($word),+], $meaning)),+];
        }

        impl $type {
            /// Every value, in the order of the reference.
            pub fn values() -> impl Iterator<Item = Self> {
                Self::ALL.iter().map(|(value, ..)| *value)
            }

            /// Its word in a configuration.
            pub fn name(self) -> &'static str {
                self.word()
            }

            /// The value that a word selects.
            pub fn named(word: &str) -> Option<Self> {
                Self::ALL.iter().find(|(_, words, _)| words.contains(&word)).map(|(value, ..)| *value)
            }
        }
    };
}

choice! {
    /// A floating-point type as the configuration names it.
    FloatType {
        /// 32 bits.
        Float32 = "float32" | "f32" | "fp32";
        /// 16 bits, 8 of exponent.
        Bfloat16 = "bfloat16" | "bf16";
    }
}

choice! {
    /// `model.init`
    InitFrom {
        /// The weights in the folder.
        Pretrained = "pretrained";
        /// Random, from config.json alone.
        Random = "random";
    }
}

choice! {
    /// `data.loss`
    LossOn {
        /// Every assistant turn.
        Assistant = "assistant";
        /// The last assistant turn.
        Last = "last";
        /// Every token.
        All = "all";
    }
}

choice! {
    /// `data.over_long`
    OverLong {
        /// Keep the first `seq_len` tokens.
        Truncate = "truncate";
        /// Leave the sample out.
        Drop = "drop";
        /// Cut it into pieces of at most `seq_len`.
        Split = "split";
    }
}

choice! {
    /// `train.loss_reduction`
    LossReduction {
        /// Sum over all trained tokens of the global batch divided by their number.
        Token = "token";
        /// Megatron's: mean of each micro-batch, then mean over micro-batches.
        Microbatch = "microbatch";
    }
}

choice! {
    /// `train.aux_loss`
    AuxLoss {
        /// As the model's config says: Hugging Face's when `output_router_logits` is set, else none.
        Auto = "auto";
        /// None.
        None = "none";
        /// Hugging Face's.
        Hf = "hf";
        /// Megatron's.
        Megatron = "megatron";
    }
}

choice! {
    /// `train.on_non_finite`
    OnNonFinite {
        /// Stop, naming the step, the layer and the samples.
        Stop = "stop";
        /// Skip the update and count it; ten in a row end the run.
        Skip = "skip";
    }
}

choice! {
    /// `optim.schedule`
    Schedule {
        /// Half a cosine from `lr` to `min_lr`.
        Cosine = "cosine";
        /// A straight line from `lr` to `min_lr`.
        Linear = "linear";
        /// `lr` throughout.
        Constant = "constant";
        /// Warm-up, stable, then linear decay over `decay`.
        Wsd = "wsd";
    }
}

choice! {
    /// `memory.recompute`
    Recompute {
        /// Nothing.
        None = "none";
        /// The parts that `memory.recompute_parts` names; attention is always kept.
        Selective = "selective";
        /// Every layer, from its input.
        Full = "full";
    }
}

choice! {
    /// One of `memory.recompute_parts`
    RecomputePart {
        /// Outputs of the norms.
        Norm = "norm";
        /// SwiGLU's output (experts never keep theirs), and q, k, v after norm and rotation.
        Act = "act";
        /// Everything of the experts but the router's decision.
        Moe = "moe";
        /// The first product of a dense feed-forward.
        Mlp = "mlp";
        /// The product of q, k and v.
        Qkv = "qkv";
    }
}

impl RecomputePart {
    /// What "selective" computes again unless `memory.recompute_parts` says otherwise.
    pub const USUAL: [RecomputePart; 3] = [RecomputePart::Norm, RecomputePart::Act, RecomputePart::Moe];
}
