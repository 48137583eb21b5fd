//! Numbers for people: bytes and seconds in the unit that suits their size.

/// Decimal units of bytes, and how many digits behind the point each is told with.
const BYTES: [Unit; 6] = [
    Unit { name: "B", size: 1.0, digits: 0 },
    Unit { name: "kB", size: 1e3, digits: 1 },
    Unit { name: "MB", size: 1e6, digits: 1 },
    Unit { name: "GB", size: 1e9, digits: 1 },
    Unit { name: "TB", size: 1e12, digits: 2 },
    Unit { name: "PB", size: 1e15, digits: 2 },
];
const SECONDS: [Unit; 7] = [
    Unit { name: "us", size: 1e-6, digits: 1 },
    Unit { name: "ms", size: 1e-3, digits: 1 },
    Unit { name: "s", size: 1.0, digits: 2 },
    Unit { name: "min", size: 60.0, digits: 1 },
    Unit { name: "h", size: 3600.0, digits: 1 },
    Unit { name: "days", size: 86_400.0, digits: 1 },
    Unit { name: "years", size: 365.25 * 86_400.0, digits: 1 },
];
/// A larger unit is taken from two of it on, for seconds and longer: 90 s, not 1.5 min.
const TWICE: f64 = 2.0;
/// Beyond this many of the largest unit digits mean nothing.
const MANY: f64 = 1e4;

/// A unit of bytes or of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unit {
    /// Its name.
    pub name: &'static str,
    /// How many bytes or seconds it is.
    size: f64,
    digits: usize,
}

impl Unit {
    /// The unit of bytes for a table whose largest value is this.
    pub fn of_bytes(largest: f64) -> Unit {
        BYTES.into_iter().rev().find(|unit| largest.abs() >= unit.size).unwrap_or(BYTES[0])
    }

    /// The unit of time for a table whose largest value is this many seconds.
    pub fn of_seconds(largest: f64) -> Unit {
        let enough = |unit: &Unit| largest.abs() >= unit.size * if unit.size > 1.0 { TWICE } else { 1.0 };
        SECONDS.into_iter().rev().find(enough).unwrap_or(SECONDS[0])
    }

    /// A value in this unit.
    pub fn of(&self, value: f64) -> f64 {
        value / self.size
    }

    /// A value in this unit, without its name.
    pub fn show(&self, value: f64) -> String {
        let scaled = self.of(value);
        let last = self.name == BYTES[BYTES.len() - 1].name || self.name == SECONDS[SECONDS.len() - 1].name;
        if last && scaled.abs() >= MANY { format!("{scaled:.1e}") } else { format!("{scaled:.*}", self.digits) }
    }

    /// A value in a column of this unit: one too small for it has its own.
    pub fn cell(&self, value: f64) -> String {
        let shown = self.show(value);
        let vanishes = value != 0.0 && !shown.contains(|c: char| ('1'..='9').contains(&c));
        if vanishes && self.is_bytes() { bytes(value) } else { shown }
    }

    fn is_bytes(&self) -> bool {
        BYTES.contains(self)
    }
}

/// Bytes: `131.1 kB`, `68.3 GB`, `3.29 TB`.
pub fn bytes(value: f64) -> String {
    let unit = Unit::of_bytes(value);
    format!("{} {}", unit.show(value), unit.name)
}

/// Bytes with their sign: `+48.8 GB`.
pub fn difference(value: f64) -> String {
    format!("{}{}", if value < 0.0 { "-" } else { "+" }, bytes(value.abs()))
}

/// A span of time: `12.3 ms`, `90.00 s`, `3.4 h`, `1.2 years`.
pub fn seconds(value: f64) -> String {
    if value == 0.0 {
        return "0 s".to_string();
    }
    let unit = Unit::of_seconds(value);
    format!("{} {}", unit.show(value), unit.name)
}

/// A count: `1,234`, `30.5 M`, `235.09 B` (10^9), `1.2e15`.
pub fn count(value: f64) -> String {
    match value.abs() {
        v if v >= 1e15 => format!("{value:.1e}"),
        v if v >= 1e9 => format!("{:.2} B", value / 1e9),
        v if v >= 1e6 => format!("{:.1} M", value / 1e6),
        _ => thousands(value),
    }
}

/// A whole number with separators.
pub fn thousands(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::from(if value < 0.0 { "-" } else { "" });
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_its_unit() {
        for (value, said) in [
            (0.0, "0 B"),
            (512.0, "512 B"),
            (131_072.0, "131.1 kB"),
            (68.3e9, "68.3 GB"),
            (3.291e12, "3.29 TB"),
            (4e15, "4.00 PB"),
            (4.2e21, "4.2e6 PB"),
        ] {
            assert_eq!(bytes(value), said);
        }
        for (value, said) in [
            (0.0, "0 s"),
            (4.2e-5, "42.0 us"),
            (0.0123, "12.3 ms"),
            (1.0, "1.00 s"),
            (90.0, "90.00 s"),
            (150.0, "2.5 min"),
            (3.0 * 3600.0, "3.0 h"),
            (5.25 * 86_400.0, "5.2 days"),
            (1.2e6 * 86_400.0, "3285.4 years"),
            (1e15, "3.2e7 years"),
        ] {
            assert_eq!(seconds(value), said);
        }
        assert_eq!((difference(-2e9).as_str(), difference(3.0).as_str()), ("-2.0 GB", "+3 B"));
        assert_eq!(count(235_093_634_560.0), "235.09 B");
        assert_eq!((count(64_512.0).as_str(), count(5.3e6).as_str(), count(1e18).as_str()), ("64,512", "5.3 M", "1.0e18"));
    }

    /// What a column's unit would round to nothing is still seen.
    #[test]
    fn a_column_loses_nothing() {
        let unit = Unit::of_bytes(665e6);
        assert_eq!(
            (unit.name, unit.cell(664.6e6).as_str(), unit.cell(12_345.0).as_str(), unit.cell(0.0).as_str()),
            ("MB", "664.6", "12.3 kB", "0.0")
        );
        assert_eq!(Unit::of_seconds(0.004).name, "ms");
    }
}
