//! Plain-text tables.

/// Columns are as wide as their widest cell; the first one is left-aligned, the others right-aligned.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with the heading of each column.
    pub fn new(head: &[&str]) -> Self {
        Self { rows: vec![head.iter().map(|cell| (*cell).to_owned()).collect()] }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: &[String]) {
        self.rows.push(cells.to_vec());
    }

    /// The table as lines, each ending with a newline.
    pub fn text(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for (at, row) in self.rows.iter().enumerate() {
            let cells = row.iter().enumerate().map(|(column, cell)| match column {
                0 => format!("{cell:<width$}", width = widths[0]),
                _ => format!("{cell:>width$}", width = widths[column]),
            });
            text.push_str(&format!("  {}\n", cells.collect::<Vec<_>>().join("  ").trim_end()));
            if at == 0 {
                let line = widths.iter().sum::<usize>() + 2 * columns.saturating_sub(1);
                text.push_str(&format!("  {}\n", "─".repeat(line)));
            }
        }
        text
    }
}

/// The value below which `percent` of the values lie (nearest rank). Sorts.
pub fn percentile(values: &mut [f64], percent: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    if values.is_empty() {
        return f64::NAN;
    }
    let rank =
        values.iter().enumerate().find(|(at, _)| (at + 1) as f64 * 100.0 >= percent * values.len() as f64);
    rank.map_or(f64::NAN, |(_, value)| *value)
}

/// The median (nearest rank), or NaN of no values. Sorts.
pub fn median(values: &mut [f64]) -> f64 {
    percentile(values, 50.0)
}

/// Milliseconds, with the significant digits.
pub fn ms(value: f64) -> String {
    match value {
        v if v.is_nan() => "–".into(),
        v if v < 10.0 => format!("{v:.2} ms"),
        v if v < 100.0 => format!("{v:.1} ms"),
        v => format!("{v:.0} ms"),
    }
}

/// Binary megabytes.
pub fn mib(bytes: f64) -> String {
    format!("{:.1} MiB", bytes / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let mut values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&mut values, 50.0), 50.0);
        assert_eq!(percentile(&mut values, 99.0), 99.0);
        assert_eq!(percentile(&mut values, 100.0), 100.0);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert!(median(&mut []).is_nan());
    }

    #[test]
    fn a_table_lines_up() {
        let mut table = Table::new(&["what", "n"]);
        table.row(&["a".into(), "1,000".into()]);
        assert_eq!(table.text(), "  what      n\n  ───────────\n  a     1,000\n");
    }
}
