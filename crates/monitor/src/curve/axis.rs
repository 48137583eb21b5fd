//! One axis: the range it shows, its ticks, and where a value lies on it.

/// Maps values to pixels.
pub(super) struct Axis {
    low: f64,
    high: f64,
    /// Pixel of `low` and of `high`.
    from: f64,
    to: f64,
    step: f64,
}

impl Axis {
    /// An axis over `low..=high` (finite), between the pixels `from` and `to`, with about `ticks` ticks.
    pub fn new(low: f64, high: f64, from: f64, to: f64, ticks: f64) -> Self {
        Self { low, high, from, to, step: nice((high - low) / ticks) }
    }

    /// The same axis with whole numbers only on its ticks.
    pub fn whole(mut self) -> Self {
        self.step = self.step.max(1.0);
        self
    }

    pub fn pixel(&self, value: f64) -> f64 {
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    /// Ticks inside the range with their labels.
    pub fn ticks(&self) -> Vec<(f64, String)> {
        let first = (self.low / self.step).ceil();
        // Ten times what is asked for at most, whatever rounding does.
        let values = (0..100).map(|i| (first + f64::from(i)) * self.step).take_while(|v| *v <= self.high);
        values.map(|v| (v, self.label(v))).collect()
    }

    fn label(&self, value: f64) -> String {
        let largest = self.low.abs().max(self.high.abs());
        if largest >= 1e7 || self.step < 1e-5 {
            return format!("{value:.1e}");
        }
        let decimals = (-self.step.log10().floor()).max(0.0) as usize;
        let text = format!("{value:.decimals$}");
        if decimals == 0 && value >= 1000.0 { crate::words::thousands(value as u64) } else { text }
    }
}

/// The next of 1, 2, 5 times a power of ten.
fn nice(raw: f64) -> f64 {
    let power = 10f64.powf(raw.log10().floor());
    let nice = [1.0, 2.0, 5.0].into_iter().find(|n| n * power >= raw * 0.999_999).unwrap_or(10.0);
    nice * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(low: f64, high: f64) -> Vec<String> {
        Axis::new(low, high, 0.0, 100.0, 5.0).ticks().into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(labels(0.83, 2.2), ["1.0", "1.5", "2.0"]);
        assert_eq!(labels(0.0, 1.0), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(labels(1.0, 5000.0), ["1,000", "2,000", "3,000", "4,000", "5,000"]);
        assert_eq!(labels(1.23451, 1.23459), ["1.23452", "1.23454", "1.23456", "1.23458"]);
        assert!(labels(1e20, 3e20).len() > 2);
        let whole: Vec<f64> = Axis::new(1.0, 3.0, 0.0, 1.0, 8.0).whole().ticks().into_iter().map(|(v, _)| v).collect();
        assert_eq!(whole, [1.0, 2.0, 3.0]);
    }

    #[test]
    fn pixels_follow_the_range() {
        let axis = Axis::new(10.0, 20.0, 100.0, 0.0, 5.0);
        assert_eq!((axis.pixel(10.0), axis.pixel(15.0), axis.pixel(20.0)), (100.0, 50.0, 0.0));
    }
}
