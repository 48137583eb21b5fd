//! What templates written for Python's Jinja expect: `tojson` as `json.dumps`, `raise_exception`, `strftime_now`.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::Map;

/// Begins the detail of errors that a template raised itself.
pub const RAISED: &str = "raised: ";
/// Deepest nesting `tojson` follows.
const MAX_DEPTH: usize = 256;

/// Adds the filter and functions.
pub fn install(env: &mut Environment<'static>) {
    env.add_filter("tojson", tojson);
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    env.add_function("strftime_now", |format: String| strftime(&format, seconds_now()));
}

/// A JSON value in the engine's types, keys in the row's order.
pub fn json_value(value: &serde_json::Value) -> Value {
    match value {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(b) => Value::from(*b),
        serde_json::Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::from(i),
            (None, Some(u)) => Value::from(u),
            (None, None) => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(s) => Value::from(s.as_str()),
        serde_json::Value::Array(items) => Value::from(items.iter().map(json_value).collect::<Vec<_>>()),
        serde_json::Value::Object(map) => map_value(map),
    }
}

/// As [`json_value`], for an object.
pub fn map_value(map: &Map<String, serde_json::Value>) -> Value {
    Value::from_pairs(map.iter().map(|(k, v)| (k.as_str(), json_value(v))))
}

/// How `json.dumps` is asked to write.
struct Style {
    ensure_ascii: bool,
    indent: Option<usize>,
    item: String,
    key: String,
    sort_keys: bool,
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, as `transformers` defines it.
fn tojson(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(v) => Some(v),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = match indent {
        Some(v) if !v.is_none() => Some(usize::try_from(v)?),
        _ => None,
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be a pair")),
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
    };
    let style = Style {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent,
        item,
        key,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    write_value(&mut out, value, &style, 0)?;
    Ok(Value::from(out))
}

fn write_value(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    let invalid = |what: &str| Error::new(ErrorKind::BadSerialization, format!("{what} is not JSON serializable"));
    if depth > MAX_DEPTH {
        return Err(invalid("a value nested this deep"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.collect::<Vec<_>>();
            write_items(out, ('[', ']'), items.len(), style, depth, |out, i| match items.get(i) {
                Some(item) => write_value(out, item, style, depth + 1),
                None => Ok(()),
            })?;
        }
        ValueKind::Map => {
            let mut keys = value.try_iter()?.map(|k| Ok((key_text(&k)?, k))).collect::<Result<Vec<_>, Error>>()?;
            if style.sort_keys {
                keys.sort_by(|a, b| a.0.cmp(&b.0));
            }
            write_items(out, ('{', '}'), keys.len(), style, depth, |out, i| {
                let Some((text, key)) = keys.get(i) else { return Ok(()) };
                write_string(out, text, style.ensure_ascii);
                out.push_str(&style.key);
                write_value(out, &value.get_item(key)?, style, depth + 1)
            })?;
        }
        other => return Err(invalid(&other.to_string())),
    }
    Ok(())
}

fn write_items(
    out: &mut String,
    (open, close): (char, char),
    count: usize,
    style: &Style,
    depth: usize,
    mut item: impl FnMut(&mut String, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let new_line = |out: &mut String, depth: usize| {
        if let Some(indent) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent.min(64) * depth));
        }
    };
    out.push(open);
    for i in 0..count {
        if i > 0 {
            out.push_str(&style.item);
        }
        new_line(out, depth + 1);
        item(out, i)?;
    }
    if count > 0 {
        new_line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn key_text(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_string(),
        ValueKind::None => "null".into(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
        ValueKind::Number => number(key),
        other => return Err(Error::new(ErrorKind::BadSerialization, format!("keys must be strings, not {other}"))),
    })
}

fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (ensure_ascii && !(' '..='~').contains(&c)) => {
                let mut units = [0_u16; 2];
                for unit in c.encode_utf16(&mut units) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn number(value: &Value) -> String {
    if value.is_integer() { value.to_string() } else { f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float_repr) }
}

/// Python's `repr` of a float: the shortest digits that read back, an exponent outside 1e-4..1e16.
pub fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "NaN".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{x}");
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

fn seconds_now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs().cast_signed())
}

/// The day (UTC) that a template's clock shows.
pub fn today() -> String {
    strftime("%Y-%m-%d", seconds_now()).unwrap_or_default()
}

/// `datetime.strftime` of a UTC time, for the directives templates use.
fn strftime(format: &str, seconds: i64) -> Result<String, Error> {
    const MONTHS: [&str; 12] =
        ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
    const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
    let (days, clock) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let month_name = MONTHS[(month - 1).rem_euclid(12) as usize];
    let day_name = DAYS[(days + 4).rem_euclid(7) as usize];
    let (hour, minute, second) = (clock / 3600, clock / 60 % 60, clock % 60);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year.rem_euclid(100))),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('I') => out.push_str(&format!("{:02}", (hour + 11) % 12 + 1)),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('j') => out.push_str(&format!("{:03}", days - days_from_new_year(year) + 1)),
            Some('Z') => out.push_str("UTC"),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('%') => out.push('%'),
            other => {
                let other = other.map(String::from).unwrap_or_default();
                return Err(Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know %{other}")));
            }
        }
    }
    Ok(out)
}

/// Year, month and day of a day counted from 1970-01-01, by Howard Hinnant's `civil_from_days`.
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + i64::from(month <= 2), month, doy - (153 * mp + 2) / 5 + 1)
}

/// Days from 1970-01-01 to the first of January of `year`.
fn days_from_new_year(year: i64) -> i64 {
    let y = year - 1;
    365 * (year - 1970) + (y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400)) - 477
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_python_prints_them() {
        let table = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (-0.0, "-0.0"),
            (1e300, "1e+300"),
        ];
        for (x, text) in table {
            assert_eq!(float_repr(x), text);
        }
    }

    #[test]
    fn dates_follow_the_calendar() {
        // `date -u -d @S '+%Y-%m-%d %a %j %I %p'` of each.
        for (s, text) in
            [(0, "1970-01-01 Thu 001 12 AM"), (951_827_696, "2000-02-29 Tue 060 12 PM"), (1_735_689_599, "2024-12-31 Tue 366 11 PM")]
        {
            assert_eq!(strftime("%Y-%m-%d %a %j %I %p", s).unwrap(), text);
        }
        assert!(strftime("%Q", 0).is_err());
    }
}
