//! Groups the differences of a replay by common text, with the most frequent causes first.

use std::{collections::BTreeMap, fmt::Write as _};

/// The number of example scenarios for each cause.
const EXAMPLES: usize = 3;
/// The number of characters of a difference by which it is grouped.
const CAUSE_CHARACTERS: usize = 90;

/// One line for each cause of lenient differences, the most frequent first. `report` is the output of the replay: a
/// line for each exchange, followed by its indented differences.
pub(super) fn by_cause(report: &str) -> String {
    let mut causes: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut exchange = None;
    for line in report.lines() {
        if let Some(named) = line.strip_prefix("LENIENT ") {
            exchange = Some(named.split(' ').next().unwrap_or(named));
        } else if !line.starts_with(' ') {
            exchange = None;
        } else if let Some(named) = exchange.take() {
            // The exchange is grouped by its first difference.
            causes.entry(cause(line.trim())).or_default().push(named);
        }
    }
    let mut causes: Vec<_> = causes.into_iter().collect();
    causes.sort_by_key(|(_, exchanges)| std::cmp::Reverse(exchanges.len()));
    let mut text = String::new();
    for (cause, exchanges) in causes {
        let count = exchanges.len();
        let mut examples = exchanges;
        examples.dedup();
        examples.truncate(EXAMPLES);
        let _ = writeln!(text, "{count:>4} {cause} ({})", examples.join(", "));
    }
    text
}

/// A difference without the parts specific to one exchange: numbers, and the end.
fn cause(difference: &str) -> String {
    let mut text = String::new();
    for character in difference.chars() {
        match character.is_ascii_digit() {
            true if text.ends_with('N') => {}
            true => text.push('N'),
            false => text.push(character),
        }
    }
    text.chars().take(CAUSE_CHARACTERS).collect()
}

#[test]
fn the_largest_cause_comes_first() {
    let report = "LENIENT a/x #1 [get] GET /a\n    status 422, found 201\n    more\n\
                  STRICT  a/x #2 [get] GET /a\n    message\n\
                  LENIENT a/x #3 [get] GET /a\n    rows[1]: a\n\
                  LENIENT b/y #1 [get] GET /b\n    rows[2]: a\n";
    assert_eq!(by_cause(report), "   2 rows[N]: a (a/x, b/y)\n   1 status N, found N (a/x)\n");
}
