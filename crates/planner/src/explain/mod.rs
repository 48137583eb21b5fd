//! Every figure of a plan, expanded to its formula with the numbers in it.
//!
//! The numbers are an arithmetic expression whose value is the figure: the tests evaluate every one of them.

mod activations;
mod life;
mod memory;
mod time;

use crate::plan::Plan;
use crate::units::thousands;
use serde::Serialize;

/// A step of an explanation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// The formula in words.
    pub formula: String,
    /// The same with numbers: `+ - x /` and brackets.
    pub numbers: String,
    /// What it comes to.
    pub value: f64,
    /// Unit of the value.
    pub unit: &'static str,
}

/// A figure explained.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// The figure's name.
    pub name: String,
    /// What it is, and where the formula is from.
    pub about: String,
    /// From the first ingredient to the figure, which is the last line.
    pub lines: Vec<Line>,
}

/// Names that [`explain`] knows, with what they are.
pub const NAMES: [(&str, &str); 41] = [
    ("model_params", "parameters of the model"),
    ("active_params", "parameters that one token of text meets"),
    ("params", "parameters of the heaviest rank"),
    ("weights", "bytes of weights"),
    ("gradients", "bytes of accumulated gradients"),
    ("masters", "bytes that complete weights to f32"),
    ("moments", "bytes of Adam's moments"),
    ("activations", "bytes of activations outside the experts"),
    ("moe", "bytes of routed rows"),
    ("logits", "bytes of logits"),
    ("communication", "bytes of communicators"),
    ("libraries", "bytes of context and workspaces"),
    ("allocator", "bytes lost to fragments"),
    ("peak", "bytes of the heaviest rank"),
    ("skewed_peak", "bytes of the heaviest rank when routing is skewed"),
    ("reserve", "bytes of a device that a chosen layout leaves free"),
    ("load", "bytes while weights are read"),
    ("first_step", "bytes in the first step"),
    ("save", "bytes while a checkpoint is written"),
    ("resume", "bytes while a checkpoint is read"),
    ("rollout", "bytes while answers are generated"),
    ("kv_cache", "bytes of keys and values of the answers under way"),
    ("in_flight", "micro-batches whose activations a stage holds"),
    ("expert_dp", "replicas of an expert"),
    ("checkpoint", "bytes of a full checkpoint"),
    ("write", "seconds to write a checkpoint to storage"),
    ("pause", "seconds that training stands still for a checkpoint"),
    ("flops", "model FLOPs of a token"),
    ("step", "seconds of an optimizer step"),
    ("compute", "seconds of compute"),
    ("recompute", "seconds of computing again"),
    ("bubble", "seconds of waiting in the pipeline"),
    ("optimizer", "seconds of the optimizer"),
    ("cp", "seconds of context-parallel communication"),
    ("tp", "seconds of tensor-parallel communication"),
    ("ep", "seconds of the experts' all-to-all"),
    ("pp", "seconds of sends between stages"),
    ("dp", "seconds of gradients and weights over replicas"),
    ("tokens_per_s", "tokens a second and device"),
    ("days", "days that the run takes"),
    ("mfu", "model FLOPs utilisation"),
];

/// Explains a figure of a plan; `None` for a name that is not in [`NAMES`].
pub fn explain(plan: &Plan, name: &str) -> Option<Explanation> {
    let (known, what) = NAMES.iter().find(|(known, _)| *known == name)?;
    let mut e = Explanation { name: (*known).to_string(), about: (*what).to_string(), lines: Vec::new() };
    if !memory::explain(plan, name, &mut e) && !life::explain(plan, name, &mut e) {
        time::explain(plan, name, &mut e);
    }
    Some(e)
}

impl Explanation {
    fn line(&mut self, formula: impl Into<String>, numbers: String, value: f64, unit: &'static str) {
        self.lines.push(Line { formula: formula.into(), numbers, value, unit });
    }

    fn because(&mut self, source: &str) {
        self.about = format!("{}. {source}", self.about);
    }

    /// The figure: the value of the last line.
    pub fn value(&self) -> f64 {
        self.lines.last().map_or(0.0, |line| line.value)
    }
}

/// Digits of a large number that is not whole: as many as keep sums and products true to 1e-9. Those of whole ones all count.
const DIGITS: i32 = 11;

/// A number of an expression, with separators; of bytes and rows that are not whole only the digits that mean something. Seconds keep all
/// theirs, for differences of them may be nothing.
fn n(value: f64) -> String {
    if value.abs() >= 1e15 || (value.abs() < 1e3 && value.fract() != 0.0) {
        return format!("{value}");
    }
    if value.fract() == 0.0 || value.abs() >= 1e11 {
        return thousands(value);
    }
    let before = value.abs().log10().floor() as i32 + 1;
    let text = format!("{value:.*}", (DIGITS - before).max(0) as usize);
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    let sign = if value < 0.0 { "-" } else { "" };
    let whole = whole.trim_start_matches('-').parse().map_or_else(|_| whole.to_string(), thousands);
    match fraction.trim_end_matches('0') {
        "" => format!("{sign}{whole}"),
        fraction => format!("{sign}{whole}.{fraction}"),
    }
}

#[cfg(test)]
mod tests {
    use super::n;

    #[test]
    fn numbers_are_told_with_the_digits_that_mean_something() {
        for (value, said) in [
            (0.0, "0"),
            (71_093_359_480.110_84, "71,093,359,480"),
            (2_348_515_008.627_268_3, "2,348,515,008.6"),
            (-1234.5, "-1,234.5"),
            (-0.25, "-0.25"),
            (9_999.999_999_999_9, "10,000"),
            (9.816_855_255_255_255e-5, "0.00009816855255255255"),
            (235_093_634_560.0, "235,093,634,560"),
            (1_200_000_000_000.4, "1,200,000,000,000"),
        ] {
            assert_eq!(n(value), said);
        }
    }
}
