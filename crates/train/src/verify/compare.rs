//! How far values are from those they should be.

use serde::Serialize;

/// How far one item is from what it is compared with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Item {
    /// Its name.
    pub name: String,
    /// Largest absolute difference divided by the largest wanted value (for lists of scalars: each by itself); NaN never passes.
    pub error: f64,
    /// Number of values compared.
    pub values: usize,
}

/// Compares a tensor; of each difference only what exceeds its slack counts (no slack where the list is empty).
pub(crate) fn compare(name: &str, got: &[f64], want: &[f64], slack: &[f64]) -> Item {
    if got.len() != want.len() {
        let name = format!("{name} ({} values, {} wanted)", got.len(), want.len());
        return Item { name, error: f64::INFINITY, values: got.len() };
    }
    let largest = want.iter().fold(0f64, |m, v| m.max(v.abs()));
    let slack = slack.iter().copied().chain(std::iter::repeat(0.0));
    let difference = largest_of(got.iter().zip(want).zip(slack).map(|((g, w), s)| beyond((g - w).abs(), s)));
    Item { name: name.into(), error: if largest > 0.0 { difference / largest } else { difference }, values: want.len() }
}

/// Compares a list of scalars, each by itself and beyond its slack.
pub(crate) fn compare_scalars(name: &str, got: &[f64], want: &[f64], slack: &[f64]) -> Item {
    let slack = slack.iter().copied().chain(std::iter::repeat(0.0));
    let error = if got.len() == want.len() {
        let beyond = |((g, w), s): ((&f64, &f64), f64)| beyond((g - w).abs(), s) / w.abs().max(f64::MIN_POSITIVE);
        largest_of(got.iter().zip(want).zip(slack).map(beyond))
    } else {
        f64::INFINITY
    };
    Item { name: name.into(), error, values: want.len() }
}

/// What of a difference exceeds its slack; `max` would swallow a NaN.
fn beyond(difference: f64, slack: f64) -> f64 {
    if difference > slack || difference.is_nan() { difference - slack } else { 0.0 }
}

/// The largest value; NaN if any is.
fn largest_of(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |m: f64, v| if v.is_nan() || m.is_nan() { f64::NAN } else { m.max(v) })
}
