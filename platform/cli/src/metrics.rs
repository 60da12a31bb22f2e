//! Parses Prometheus' text format, and computes the values of `top` from two readings.

use std::collections::BTreeMap;

/// One sample: its name, its labels, its value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) value: f64,
}

impl Sample {
    pub(crate) fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }
}

/// All samples of a text; other lines are skipped.
pub(crate) fn parse(text: &str) -> Vec<Sample> {
    text.lines().filter_map(sample).collect()
}

fn sample(line: &str) -> Option<Sample> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return None;
    }
    let name_ends = line.find(|c: char| c == '{' || c.is_whitespace())?;
    let (name, rest) = line.split_at(name_ends);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inner) => labels(inner)?,
        None => (BTreeMap::new(), rest),
    };
    let value = match rest.split_whitespace().next()? {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        number => number.parse().ok()?,
    };
    Some(Sample { name: name.to_owned(), labels, value })
}

/// Parses `a="b",c="d"}`; returns the labels and the text after them.
fn labels(mut text: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        text = text.trim_start_matches([',', ' ']);
        if let Some(rest) = text.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, rest) = text.split_once("=\"")?;
        let mut value = String::new();
        let mut letters = rest.char_indices();
        let end = loop {
            match letters.next()? {
                (at, '"') => break at,
                (_, '\\') => match letters.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (_, letter) => value.push(letter),
            }
        };
        labels.insert(name.trim().to_owned(), value);
        text = &rest[end + 1..];
    }
}

/// A histogram's cumulative buckets: upper bound and count.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Histogram(Vec<(f64, f64)>);

impl Histogram {
    /// Adds a bucket; buckets of several series with the same bound are summed.
    pub(crate) fn add(&mut self, bound: f64, count: f64) {
        match self.0.iter_mut().find(|(known, _)| *known == bound) {
            Some((_, sum)) => *sum += count,
            None => self.0.push((bound, count)),
        }
    }

    /// The counts since an earlier reading.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let before =
            |bound: f64| earlier.0.iter().find(|(known, _)| *known == bound).map_or(0.0, |(_, n)| *n);
        Self(self.0.iter().map(|(bound, count)| (*bound, (count - before(*bound)).max(0.0))).collect())
    }

    pub(crate) fn count(&self) -> f64 {
        self.0.iter().map(|(_, count)| *count).fold(0.0, f64::max)
    }

    /// The quantile `q`, interpolated within its bucket as in Prometheus; `None` if nothing was counted.
    pub(crate) fn quantile(&self, q: f64) -> Option<f64> {
        let mut buckets = self.0.clone();
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let total = buckets.last()?.1;
        if total <= 0.0 {
            return None;
        }
        let rank = q * total;
        let mut lower = (0.0, 0.0);
        for (bound, count) in buckets {
            if count >= rank {
                if bound.is_infinite() {
                    // Nothing is known beyond the largest finite bound.
                    return Some(lower.0);
                }
                let inside = count - lower.1;
                let share = if inside > 0.0 { (rank - lower.1) / inside } else { 1.0 };
                return Some(lower.0 + (bound - lower.0) * share);
            }
            lower = (bound, count);
        }
        Some(lower.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_format() {
        let text = "# HELP x y\n# TYPE x counter\nx_total{a=\"b\",c=\"d \\\"q\\\" \\\\ }\"} 3 1700000000\nplain 1.5\n\
                    h_bucket{le=\"+Inf\"} 7\n\nbroken{a=\"b 3\ninf +Inf\n# EOF\n";
        let samples = parse(text);
        let names: Vec<_> = samples.iter().map(|sample| sample.name.as_str()).collect();
        assert_eq!(names, ["x_total", "plain", "h_bucket", "inf"]);
        assert_eq!(samples[0].label("c"), "d \"q\" \\ }");
        assert_eq!((samples[0].value, samples[1].value), (3.0, 1.5));
        assert_eq!(samples[0].label("nothing"), "");
        assert!(samples[3].value.is_infinite());
    }

    #[test]
    fn quantiles() {
        let mut histogram = Histogram::default();
        for (bound, count) in [(f64::INFINITY, 100.0), (0.1, 50.0), (1.0, 90.0)] {
            histogram.add(bound, count);
        }
        assert_eq!(histogram.quantile(0.5), Some(0.1));
        assert_eq!(histogram.quantile(0.7), Some(0.1 + 0.9 * 0.5));
        assert_eq!(histogram.quantile(0.99), Some(1.0));
        assert_eq!(histogram.count(), 100.0);
        let later = histogram.since(&histogram);
        assert_eq!(later.quantile(0.5), None);
        assert_eq!(Histogram::default().quantile(0.5), None);
    }
}
