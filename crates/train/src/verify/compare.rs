//! How far values are from those they should be.

use serde::Serialize;

/// How far one item is from what it is compared with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Item {
    /// Its name.
    pub name: String,
    /// Largest absolute difference divided by the largest wanted value (for lists of scalars: each by itself).
    pub difference: f64,
    /// The same of what exceeds the noise: this is judged. NaN never passes.
    pub error: f64,
    /// Number of values compared.
    pub values: usize,
}

impl Item {
    /// Something that cannot be compared, which never passes.
    pub(crate) fn wrong(name: String, values: usize) -> Item {
        Item { name, difference: f64::INFINITY, error: f64::INFINITY, values }
    }
}

/// Compares a tensor; of each difference only what exceeds its slack counts as an error (no slack where the list is empty).
pub(crate) fn compare(name: &str, got: &[f64], want: &[f64], slack: &[f64]) -> Item {
    let largest = want.iter().fold(0f64, |m, v| m.max(v.abs()));
    item(name, got, want, slack, |_| if largest > 0.0 { largest } else { 1.0 })
}

/// Compares a list of scalars, each by itself and beyond its slack.
pub(crate) fn compare_scalars(name: &str, got: &[f64], want: &[f64], slack: &[f64]) -> Item {
    item(name, got, want, slack, |want| want.abs().max(f64::MIN_POSITIVE))
}

/// Compares values; `scale` gives for a wanted value what its difference is divided by.
fn item(name: &str, got: &[f64], want: &[f64], slack: &[f64], scale: impl Fn(f64) -> f64) -> Item {
    if got.len() != want.len() {
        return Item::wrong(format!("{name} ({} values, {} wanted)", got.len(), want.len()), got.len());
    }
    let slack = slack.iter().copied().chain(std::iter::repeat(0.0));
    let differences = got.iter().zip(want).map(|(g, w)| ((g - w).abs(), scale(*w)));
    let difference = largest_of(differences.clone().map(|(d, scale)| d / scale));
    let error = largest_of(differences.zip(slack).map(|((d, scale), slack)| beyond(d, slack) / scale));
    Item { name: name.into(), difference, error, values: want.len() }
}

/// What of a difference exceeds its slack; `max` would swallow a NaN.
fn beyond(difference: f64, slack: f64) -> f64 {
    if difference > slack || difference.is_nan() { difference - slack } else { 0.0 }
}

/// The largest value; NaN if any is.
fn largest_of(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |m: f64, v| if v.is_nan() || m.is_nan() { f64::NAN } else { m.max(v) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_shown_and_not_judged() {
        let found = compare("x", &[1.0, 3.0, -8.0], &[1.0, 2.0, -10.0], &[0.0, 1.0, 1.5]);
        assert_eq!((found.difference, found.error, found.values), (0.2, 0.05, 3));
        let within = compare("x", &[1.0, 3.0], &[1.0, 2.0], &[0.0, 1.0]);
        assert_eq!((within.difference, within.error), (0.5, 0.0));
        let scalars = compare_scalars("x", &[1.5, 20.0], &[1.0, 16.0], &[0.0, 4.0]);
        assert_eq!((scalars.difference, scalars.error), (0.5, 0.5));
    }

    #[test]
    fn what_is_no_number_or_missing_never_passes() {
        let nan = compare("x", &[f64::NAN, 1.0], &[1.0, 1.0], &[9.0, 9.0]);
        assert!(nan.error.is_nan() && nan.difference.is_nan());
        assert_eq!(compare_scalars("x", &[1.0], &[1.0, 2.0], &[]).error, f64::INFINITY);
        assert_eq!(compare("x", &[0.5], &[0.0], &[]).error, 0.5, "zeros have no scale");
    }
}
