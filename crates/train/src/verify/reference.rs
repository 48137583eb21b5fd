//! What a model is compared with.

use super::examine::Answers;
use super::gathered::Gathered;
use crate::Result;
use temper_config::Arch;
use temper_model::{Names, declare};

/// Named values: `logits`, `loss`, `aux_loss`, `grad/NAME`, `step_loss`, `step_grad_norm`, `trained/NAME`.
pub(crate) trait Reference {
    /// All of them.
    fn names(&self) -> Vec<&str>;
    /// Those of one name, if there are any.
    ///
    /// # Errors
    /// When they are no floats.
    fn floats(&self, name: &str) -> Result<Option<Vec<f64>>>;
    /// Number of tokens that greedy decoding gives.
    fn greedy(&self) -> usize {
        0
    }
}

/// The answers of one rank.
pub(crate) struct OneRank {
    answers: Answers,
    names: Names,
    all: Vec<String>,
}

impl OneRank {
    /// Answers of the model of an architecture.
    pub fn new(answers: Answers, arch: &Arch) -> OneRank {
        let whole = declare(arch);
        let pieces: Vec<&str> = whole.iter().flat_map(|p| &p.pieces).map(|p| p.name.as_str()).collect();
        let scalars = ["logits", "loss", "aux_loss", "step_loss", "step_grad_norm"].map(String::from);
        let named = ["grad/", "trained/"].into_iter().flat_map(|prefix| pieces.iter().map(move |name| format!("{prefix}{name}")));
        let all = scalars.into_iter().filter(|n| n != "aux_loss" || answers.aux_loss.is_some()).chain(named).collect();
        OneRank { names: Names::new(&whole), answers, all }
    }
}

impl Reference for OneRank {
    fn names(&self) -> Vec<&str> {
        self.all.iter().map(String::as_str).collect()
    }

    fn floats(&self, name: &str) -> Result<Option<Vec<f64>>> {
        let a = &self.answers;
        let tensor = |from: &Gathered, name: &str| self.names.find(name).and_then(|place| from.get(place.id, place.range.clone()));
        Ok(match name {
            "logits" => a.logits.clone(),
            "loss" => a.loss.map(|l| vec![l]),
            "aux_loss" => a.aux_loss.map(|l| vec![l]),
            "step_loss" => Some(a.step_loss.clone()),
            "step_grad_norm" => Some(a.step_norm.clone()),
            _ => match name.split_once('/') {
                Some(("grad", name)) => tensor(&a.grads, name),
                Some(("trained", name)) => tensor(&a.trained, name),
                _ => None,
            },
        })
    }
}
