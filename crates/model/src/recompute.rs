//! What the forward pass keeps for the backward pass, and what is computed again.

use std::fmt;
use temper_config::{Memory, RecomputePart};

/// What is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Recompute {
    /// All activations.
    #[default]
    None,
    /// All but the chosen parts, each computed again from what it was computed from.
    Selective(Parts),
    /// Only the input of each layer; its forward runs again just before its backward.
    Full,
}

/// Parts of a layer that are computed again. Attention itself is always kept (its output and log-sum-exp).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Parts {
    /// Outputs of the two norms.
    pub norm: bool,
    /// SwiGLU's output; q, k, v after norm and rotation. One pass over memory each.
    pub act: bool,
    /// The experts: gathered rows and their first product (the router's decision is kept).
    pub moe: bool,
    /// The first product of the dense feed-forward, and its activation.
    pub mlp: bool,
    /// The product of q, k and v, and what follows from it.
    pub qkv: bool,
}

impl Parts {
    /// The parts chosen.
    pub fn of(chosen: &[RecomputePart]) -> Parts {
        let has = |part| chosen.contains(&part);
        Parts {
            norm: has(RecomputePart::Norm),
            act: has(RecomputePart::Act),
            moe: has(RecomputePart::Moe),
            mlp: has(RecomputePart::Mlp),
            qkv: has(RecomputePart::Qkv),
        }
    }

    /// Those of "selective" where the user names none.
    pub fn usual() -> Parts {
        Parts::of(&RecomputePart::USUAL)
    }

    fn has(self, part: RecomputePart) -> bool {
        match part {
            RecomputePart::Norm => self.norm,
            RecomputePart::Act => self.act,
            RecomputePart::Moe => self.moe,
            RecomputePart::Mlp => self.mlp,
            RecomputePart::Qkv => self.qkv,
        }
    }
}

impl Recompute {
    /// What a configuration asks for.
    pub fn of(memory: &Memory) -> Recompute {
        match memory.recompute {
            temper_config::Recompute::None => Recompute::None,
            temper_config::Recompute::Selective => Recompute::Selective(Parts::of(&memory.recompute_parts)),
            temper_config::Recompute::Full => Recompute::Full,
        }
    }

    /// Reads what [`Recompute`] is written as: `none`, `full`, `selective` for the usual parts, or parts like `norm+moe`.
    pub fn parse(text: &str) -> Option<Recompute> {
        match text {
            "none" => Some(Recompute::None),
            "selective" => Some(Recompute::Selective(Parts::usual())),
            "full" => Some(Recompute::Full),
            parts => {
                let parts: Option<Vec<RecomputePart>> = parts.split('+').map(RecomputePart::named).collect();
                Some(Recompute::Selective(Parts::of(&parts?)))
            }
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Recompute::None => f.write_str("none"),
            Recompute::Full => f.write_str("full"),
            Recompute::Selective(parts) if *parts == Parts::usual() => f.write_str("selective"),
            Recompute::Selective(parts) => {
                let names: Vec<&str> = RecomputePart::values().filter(|part| parts.has(*part)).map(RecomputePart::name).collect();
                f.write_str(&names.join("+"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_reads_as_it_is_written() {
        for text in ["none", "selective", "full", "norm", "moe", "norm+act", "norm+moe+mlp", "norm+act+moe+mlp+qkv"] {
            assert_eq!(Recompute::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Recompute::parse("act+moe+norm"), Some(Recompute::Selective(Parts::usual())));
        for text in ["", "some", "norm+", "full+norm"] {
            assert_eq!(Recompute::parse(text), None, "{text}");
        }
    }
}
