//! [`Refusal`]: why a pipeline cannot be made as it was asked for.

/// The constraint that a pipeline breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PipelineRule {
    /// Every stage exists, and every chunk of it has a layer.
    Stages,
    /// Stages of unequal size must be asked for, and together have all layers.
    Split,
    /// Virtual stages need a pipeline, equal chunks of a stage, and micro-batches in multiples of the stages.
    Interleaving,
}

/// A pipeline that cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{found}. {remedy}")]
pub struct Refusal {
    /// The constraint.
    pub rule: PipelineRule,
    /// What was found, in numbers.
    pub found: String,
    /// The nearest remedy, a sentence.
    pub remedy: String,
}

impl Refusal {
    pub(crate) fn new(rule: PipelineRule, found: String, remedy: String) -> Refusal {
        Refusal { rule, found, remedy }
    }
}
