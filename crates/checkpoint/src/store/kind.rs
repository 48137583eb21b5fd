//! What a checkpoint holds of every parameter.

use serde::{Deserialize, Serialize};
use std::fmt;

/// One of the three tensors that a checkpoint holds of every parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The weight, in the type it is trained in (its exact f32 master where there is one).
    Weight,
    /// AdamW's first moment.
    ExpAvg,
    /// AdamW's second moment.
    ExpAvgSq,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 3] = [Kind::Weight, Kind::ExpAvg, Kind::ExpAvgSq];

    /// What stands before a tensor's name in the files of a checkpoint of one rank.
    pub(crate) const fn prefix(self) -> &'static str {
        match self {
            Kind::Weight => "",
            Kind::ExpAvg => "exp_avg.",
            Kind::ExpAvgSq => "exp_avg_sq.",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Weight => "weight",
            Kind::ExpAvg => "exp_avg",
            Kind::ExpAvgSq => "exp_avg_sq",
        })
    }
}
