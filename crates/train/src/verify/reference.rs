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
    /// How far each value may be off because this reference is not exact itself; nothing where it counts as exact.
    fn rounding(&self, _name: &str) -> Result<Vec<f64>> {
        Ok(Vec::new())
    }
    /// Number of tokens that greedy decoding gives.
    fn greedy(&self) -> usize {
        0
    }
}

/// The answers of one rank, and of one rank in double precision, which says how exact they are.
pub(crate) struct OneRank {
    answers: Answers,
    exact: Option<Answers>,
    names: Names,
    all: Vec<String>,
}

impl OneRank {
    /// Answers of the model of an architecture.
    pub fn new(answers: Answers, exact: Option<Answers>, arch: &Arch) -> OneRank {
        let whole = declare(arch);
        let pieces: Vec<&str> = whole.iter().flat_map(|p| &p.pieces).map(|p| p.name.as_str()).collect();
        let scalars = ["logits", "loss", "aux_loss", "step_loss", "step_grad_norm"].map(String::from);
        let named = ["grad/", "trained/"].into_iter().flat_map(|prefix| pieces.iter().map(move |name| format!("{prefix}{name}")));
        let all = scalars.into_iter().filter(|n| n != "aux_loss" || answers.aux_loss.is_some()).chain(named).collect();
        OneRank { names: Names::new(&whole), answers, exact, all }
    }

    fn answer(&self, a: &Answers, name: &str) -> Option<Vec<f64>> {
        let tensor = |from: &Gathered, name: &str| self.names.find(name).and_then(|place| from.get(place.id, place.range.clone()));
        match name {
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
        }
    }

    /// How far single precision is off: of gradients and weights, relative to the largest of each tensor.
    pub fn told(&self) -> Option<String> {
        self.exact.as_ref()?;
        let worst = |prefix: &str| {
            let relative = |name: &String| -> Option<f64> {
                let (off, want) = (self.rounding(name).ok()?, self.answer(&self.answers, name)?);
                Some(off.first()? / 2.0 / want.iter().fold(f64::MIN_POSITIVE, |m, v| m.max(v.abs())))
            };
            self.all.iter().filter(|n| n.starts_with(prefix)).filter_map(relative).fold(0.0, f64::max)
        };
        let (grads, weights) = (worst("grad/"), worst("trained/"));
        Some(format!(
            "one rank itself is off from double precision by up to {grads:.1e} of a tensor's largest gradient and {weights:.1e} of its largest weight: \
             of each item twice what one rank is off does not count (docs/NUMERICS.md)"
        ))
    }
}

impl Reference for OneRank {
    fn names(&self) -> Vec<&str> {
        self.all.iter().map(String::as_str).collect()
    }

    fn floats(&self, name: &str) -> Result<Option<Vec<f64>>> {
        Ok(self.answer(&self.answers, name))
    }

    /// Both may be as far from exact values as this one is: for steps what it was off by until then, else its largest difference.
    fn rounding(&self, name: &str) -> Result<Vec<f64>> {
        let exact = self.exact.as_ref().and_then(|exact| self.answer(exact, name));
        let (Some(one), Some(exact)) = (self.answer(&self.answers, name), exact) else { return Ok(Vec::new()) };
        let mut so_far = 0f64;
        let until: Vec<f64> = one
            .iter()
            .zip(&exact)
            .map(|(a, b)| {
                so_far = so_far.max(2.0 * (a - b).abs());
                so_far
            })
            .collect();
        Ok(if name.starts_with("step_") { until } else { vec![so_far; one.len()] })
    }
}
