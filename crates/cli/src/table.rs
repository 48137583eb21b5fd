//! Plain tables for the terminal.

use std::fmt;

/// Rows of text in aligned columns: the first and the last to the left, those between to the right.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column titles.
    pub fn new(titles: &[&str]) -> Table {
        Table { rows: vec![titles.iter().map(|t| (*t).to_string()).collect()] }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| self.rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut lines = Vec::new();
        for row in &self.rows {
            let mut line = String::new();
            for (c, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[c] - cell.chars().count());
                let gap = if c == 0 { "" } else { "  " };
                line += &if c == 0 || c + 1 == columns { format!("{gap}{cell}{pad}") } else { format!("{gap}{pad}{cell}") };
            }
            lines.push(line.trim_end().to_string());
        }
        f.write_str(&lines.join("\n"))
    }
}
