//! The learning rate as a function of the step.
//!
//! Steps count from 1 and the first update already uses the schedule's value at 1, so a warm-up of w steps reaches the
//! peak at step w and the last step runs at `min_lr`.

use temper_config::{Optim, Schedule, Span};

/// A schedule over a run of known length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    peak: f64,
    min: f64,
    schedule: Schedule,
    warmup: usize,
    decay: usize,
    steps: usize,
}

impl LearningRate {
    /// The schedule of `optim` over `steps` steps. Shares of the run are rounded up to whole steps.
    pub fn new(optim: &Optim, steps: usize) -> LearningRate {
        let whole = |span: Span| match span {
            Span::Steps(n) => n,
            Span::Fraction(f) => (f * steps as f64).ceil() as usize,
        };
        LearningRate {
            peak: optim.lr,
            min: optim.min_lr,
            schedule: optim.schedule,
            warmup: whole(optim.warmup).min(steps),
            decay: whole(optim.decay),
            steps,
        }
    }

    /// Learning rate of step `step` (from 1).
    pub fn at(&self, step: usize) -> f64 {
        if step <= self.warmup {
            return self.peak * step as f64 / self.warmup as f64;
        }
        let share = |from: usize| ((step.saturating_sub(from)) as f64 / (self.steps.saturating_sub(from)).max(1) as f64).min(1.0);
        match self.schedule {
            Schedule::Constant => self.peak,
            Schedule::Linear => self.peak + (self.min - self.peak) * share(self.warmup),
            Schedule::Cosine => self.min + (self.peak - self.min) * 0.5 * (1.0 + (std::f64::consts::PI * share(self.warmup)).cos()),
            Schedule::Wsd => {
                let stable_until = self.steps.saturating_sub(self.decay).max(self.warmup);
                self.peak + (self.min - self.peak) * share(stable_until)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn optim(schedule: Schedule, warmup: Span) -> Optim {
        Optim {
            lr: 1e-3,
            min_lr: 1e-4,
            schedule,
            warmup,
            decay: Span::Steps(4),
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            clip: 1.0,
        }
    }

    #[test]
    fn cosine_equals_the_published_sequence() {
        let lr = LearningRate::new(&optim(Schedule::Cosine, Span::Steps(3)), 12);
        let expected = [
            0.0003333333333333333,
            0.0006666666666666666,
            0.001,
            0.0009728616793536588,
            0.00089471999940354,
            0.0007750000000000001,
            0.0006281416799501188,
            0.00047185832004988137,
            0.0003250000000000001,
            0.00020528000059645996,
            0.00012713832064634127,
            0.0001,
        ];
        for (i, e) in expected.into_iter().enumerate() {
            assert!((lr.at(i + 1) / e - 1.0).abs() < 1e-12, "step {}: {} and {e}", i + 1, lr.at(i + 1));
        }
    }

    #[test]
    fn every_schedule_starts_and_ends_where_it_should() {
        for (schedule, middle, last) in [
            (Schedule::Linear, 0.00055, 1e-4),
            (Schedule::Constant, 1e-3, 1e-3),
            (Schedule::Wsd, 1e-3, 1e-4),
            (Schedule::Cosine, 0.00055, 1e-4),
        ] {
            let lr = LearningRate::new(&optim(schedule, Span::Fraction(0.2)), 10);
            assert!((lr.at(1) - 0.5e-3).abs() < 1e-12);
            assert!((lr.at(2) - 1e-3).abs() < 1e-12);
            assert!((lr.at(6) - middle).abs() < 1e-12, "{schedule:?} {}", lr.at(6));
            assert!((lr.at(10) - last).abs() < 1e-12, "{schedule:?} {}", lr.at(10));
        }
    }

    #[test]
    fn no_warmup_and_a_single_step() {
        let lr = LearningRate::new(&optim(Schedule::Constant, Span::Steps(0)), 1);
        assert_eq!(lr.at(1), 1e-3);
        assert!(LearningRate::new(&optim(Schedule::Cosine, Span::Steps(0)), 1).at(1).is_finite());
    }
}
