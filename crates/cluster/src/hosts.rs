//! Hostfiles: one host a line, `host`, `host slots=8` or `host:8`; `#` begins a comment.

use crate::error::{Error, Result};
use std::{fs, path::Path};

/// What a hostfile holds.
const FORMS: &str = "one host a line: `host`, `host slots=8` or `host:8`";

/// A host of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Name, as ssh takes it (`user@host` too).
    pub name: String,
    /// Ranks it takes, where the file says.
    pub slots: Option<usize>,
}

impl Host {
    /// The name by which other hosts reach it.
    pub fn address(&self) -> &str {
        self.name.rsplit_once('@').map_or(&self.name, |(_, host)| host)
    }
}

/// Reads a hostfile.
///
/// # Errors
/// Names the file and the line.
pub fn read(path: &Path) -> Result<Vec<Host>> {
    let said = |what: String| Error::Input(format!("--hostfile {}: {what}", path.display()));
    let bytes = fs::read(path).map_err(|e| said(format!("cannot be read: {e}. Give a file with {FORMS}")))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let line = 1 + e.as_bytes().iter().take(e.utf8_error().valid_up_to()).filter(|b| **b == b'\n').count();
        said(format!("line {line} is not UTF-8. Write a plain text file with {FORMS}"))
    })?;
    parse(&text, path)
}

/// As [`read`], of text.
///
/// # Errors
/// As [`read`].
pub fn parse(text: &str, path: &Path) -> Result<Vec<Host>> {
    let mut hosts: Vec<(usize, Host)> = vec![];
    for (n, line) in text.lines().enumerate() {
        let wrong = |what: String| Error::Hostfile { path: path.into(), line: n + 1, what };
        let line_text = line.split('#').next().unwrap_or_default().trim();
        if line_text.is_empty() {
            continue;
        }
        let host = host(line_text).map_err(wrong)?;
        if let Some((at, _)) = hosts.iter().find(|(_, h)| h.name == host.name) {
            return Err(wrong(format!("{} is in line {at} already. Name every host once, with all its slots", host.name)));
        }
        hosts.push((n + 1, host));
    }
    if hosts.is_empty() {
        return Err(Error::Hostfile { path: path.into(), line: 1, what: format!("no host. Write {FORMS}") });
    }
    Ok(hosts.into_iter().map(|(_, host)| host).collect())
}

fn host(text: &str) -> std::result::Result<Host, String> {
    let mut words = text.split_whitespace();
    let first = words.next().unwrap_or_default();
    // A name with several colons is an IPv6 address.
    let (name, mut slots) = match first.split_once(':') {
        Some((name, n)) if !n.contains(':') => (name, Some(number(n)?)),
        _ => (first, None),
    };
    for word in words {
        let n =
            word.strip_prefix("slots=").ok_or_else(|| format!("{word:?} is not understood. Write `host`, `host slots=8` or `host:8`"))?;
        if slots.replace(number(n)?).is_some() {
            return Err("the slots are given twice. Give them once".into());
        }
    }
    // A name that begins with a dash would be an option of ssh.
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-@:".contains(c);
    if name.is_empty() || name.starts_with('-') || !name.chars().all(plain) {
        return Err(format!("{name:?} is no name of a host"));
    }
    Ok(Host { name: name.into(), slots })
}

fn number(text: &str) -> std::result::Result<usize, String> {
    let n = text.parse().ok().filter(|n| (1..=1024).contains(n));
    n.ok_or_else(|| format!("{text:?} is no number of slots. Give one from 1 to 1024"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read() {
        let text = "# cluster\ngpu-1\n\n gpu-2 slots=8 # new\ngpu-3:4\nme@10.0.0.4\nfd00::1 slots=2\n";
        let host = |name: &str, slots| Host { name: name.into(), slots };
        let expect =
            [host("gpu-1", None), host("gpu-2", Some(8)), host("gpu-3", Some(4)), host("me@10.0.0.4", None), host("fd00::1", Some(2))];
        assert_eq!(parse(text, Path::new("h")).unwrap(), expect);
        assert_eq!(expect[3].address(), "10.0.0.4");
    }

    #[test]
    fn a_file_that_is_none_or_no_text_is_the_user_s_fault() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hosts");
        let wrong = |expect: &str| {
            let error = read(&path).unwrap_err();
            assert!(error.is_bad_input() && error.to_string().contains(expect), "{error}");
        };
        wrong("hosts: cannot be read: No such file");
        fs::write(&path, b"gpu-1\ngpu-2\ng\xffpu\n").unwrap();
        wrong("hosts: line 3 is not UTF-8");
    }

    #[test]
    fn errors_name_the_line() {
        let cases = [
            ("", "hosts:1: no host"),
            ("a\nb slot=8", "hosts:2: \"slot=8\" is not understood"),
            ("a slots=x", "hosts:1: \"x\" is no number"),
            ("a:0", "hosts:1: \"0\" is no number"),
            ("a:4 slots=4", "hosts:1: the slots are given twice"),
            ("a\n#\na", "hosts:3: a is in line 1 already"),
            ("-oProxyCommand=x", "hosts:1: \"-oProxyCommand=x\" is no name"),
            ("a;reboot", "hosts:1: \"a;reboot\" is no name"),
        ];
        for (text, expect) in cases {
            let error = parse(text, Path::new("hosts")).unwrap_err().to_string();
            assert!(error.starts_with(expect), "{text:?}: {error}");
        }
    }
}
