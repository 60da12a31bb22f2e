//! Event patterns in EventBridge's language.
//!
//! A pattern is an object with the structure of the events that it matches. Where it has an array, the event's value
//! must match one of the array's entries, which are values or rules (`prefix`, `suffix`, `anything-but`, `numeric`,
//! `exists`, `equals-ignore-case`, `wildcard`, `cidr`). All fields must match; `$or` has alternatives. An array in the
//! event matches if one of its items does. Source: Amazon EventBridge User Guide, "Event patterns" and "Comparison
//! operators".

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value};

/// Deepest nesting of a pattern.
const DEPTH_MAX: usize = 32;
/// Maximum number of rules in one pattern.
const RULES_MAX: usize = 1_000;

/// A pattern, parsed.
#[derive(Clone, Debug, PartialEq)]
pub struct Pattern(Vec<Condition>);

/// An error in a pattern: its path (`detail.state`), and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatternError {
    pub path: String,
    pub message: String,
}

/// All conditions of one level have to hold.
#[derive(Clone, Debug, PartialEq)]
enum Condition {
    /// The field matches one of the rules.
    Leaf(String, Vec<Rule>),
    /// The field is an object that matches.
    Nested(String, Vec<Condition>),
    /// One of these levels matches.
    Or(Vec<Vec<Condition>>),
}

#[derive(Clone, Debug, PartialEq)]
enum Rule {
    Equals(Value),
    EqualsIgnoreCase(String),
    Prefix(String, Case),
    Suffix(String, Case),
    Wildcard(Vec<Glob>),
    Numeric(Vec<(Comparison, f64)>),
    Cidr(IpNet),
    Exists(bool),
    AnythingBut(Vec<Rule>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Case {
    Counts,
    Ignored,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Comparison {
    Less,
    LessOrEqual,
    Equal,
    GreaterOrEqual,
    Greater,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Glob {
    Anything,
    One(char),
}

impl Pattern {
    /// Parses a pattern.
    ///
    /// # Errors
    /// All errors of the pattern.
    pub fn parse(pattern: &Value) -> Result<Self, Vec<PatternError>> {
        let mut parser = Parser::default();
        let Value::Object(map) = pattern else {
            return Err(vec![PatternError { path: String::new(), message: "a pattern is an object".into() }]);
        };
        let conditions = parser.level(map);
        match parser.problems.is_empty() {
            true => Ok(Self(conditions)),
            false => Err(parser.problems),
        }
    }

    /// Whether an event matches.
    pub fn matches(&self, event: &Value) -> bool {
        holds(&self.0, Some(event))
    }
}

fn holds(level: &[Condition], value: Option<&Value>) -> bool {
    if let Some(Value::Array(items)) = value {
        return items.iter().any(|item| holds(level, Some(item)));
    }
    let map = value.and_then(Value::as_object);
    level.iter().all(|condition| match condition {
        Condition::Leaf(field, rules) => {
            let found = map.and_then(|map| map.get(field));
            rules.iter().any(|rule| rule.fits(found))
        }
        Condition::Nested(field, inner) => holds(inner, map.and_then(|map| map.get(field))),
        Condition::Or(levels) => levels.iter().any(|level| holds(level, value)),
    })
}

impl Rule {
    fn fits(&self, value: Option<&Value>) -> bool {
        match (self, value) {
            // As in EventBridge, `exists` is about leaves only.
            (Self::Exists(wanted), value) => value.is_some_and(|value| !value.is_object()) == *wanted,
            (_, None) => false,
            (rule, Some(Value::Array(items))) => items.iter().any(|item| rule.fits_one(item)),
            (rule, Some(value)) => rule.fits_one(value),
        }
    }

    fn fits_one(&self, value: &Value) -> bool {
        let text = value.as_str();
        match self {
            Self::Equals(Value::Number(wanted)) => {
                value.as_f64().zip(wanted.as_f64()).is_some_and(|(a, b)| a == b)
            }
            Self::Equals(wanted) => value == wanted,
            Self::EqualsIgnoreCase(wanted) => text.is_some_and(|text| folded(text) == *wanted),
            Self::Prefix(wanted, Case::Counts) => text.is_some_and(|text| text.starts_with(wanted)),
            Self::Prefix(wanted, Case::Ignored) => text.is_some_and(|text| folded(text).starts_with(wanted)),
            Self::Suffix(wanted, Case::Counts) => text.is_some_and(|text| text.ends_with(wanted)),
            Self::Suffix(wanted, Case::Ignored) => text.is_some_and(|text| folded(text).ends_with(wanted)),
            Self::Wildcard(glob) => text.is_some_and(|text| fits_glob(glob, text)),
            Self::Numeric(all) => {
                value.as_f64().is_some_and(|number| all.iter().all(|(how, than)| how.holds(number, *than)))
            }
            Self::Cidr(net) => {
                text.and_then(|text| text.parse::<IpAddr>().ok()).is_some_and(|ip| net.contains(&ip))
            }
            Self::Exists(wanted) => *wanted,
            Self::AnythingBut(rules) => !value.is_object() && !rules.iter().any(|rule| rule.fits_one(value)),
        }
    }
}

impl Comparison {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "<" => Self::Less,
            "<=" => Self::LessOrEqual,
            "=" => Self::Equal,
            ">=" => Self::GreaterOrEqual,
            ">" => Self::Greater,
            _ => return None,
        })
    }

    fn holds(self, number: f64, than: f64) -> bool {
        match self {
            Self::Less => number < than,
            Self::LessOrEqual => number <= than,
            Self::Equal => number == than,
            Self::GreaterOrEqual => number >= than,
            Self::Greater => number > than,
        }
    }
}

fn folded(text: &str) -> String {
    text.to_lowercase()
}

/// Backtracks to the last star only, so that the time is bounded by the product of both lengths.
fn fits_glob(glob: &[Glob], text: &str) -> bool {
    let text: Vec<char> = text.chars().collect();
    let (mut at, mut seen, mut star) = (0, 0, None);
    while seen < text.len() {
        match glob.get(at) {
            Some(Glob::Anything) => {
                star = Some((at, seen));
                at += 1;
            }
            Some(Glob::One(wanted)) if *wanted == text[seen] => {
                at += 1;
                seen += 1;
            }
            _ => match star {
                Some((place, taken)) => {
                    star = Some((place, taken + 1));
                    at = place + 1;
                    seen = taken + 1;
                }
                None => return false,
            },
        }
    }
    glob[at..].iter().all(|one| *one == Glob::Anything)
}

#[derive(Default)]
struct Parser {
    path: Vec<String>,
    rules: usize,
    problems: Vec<PatternError>,
}

impl Parser {
    fn wrong(&mut self, message: impl Into<String>) {
        self.problems.push(PatternError { path: self.path.join("."), message: message.into() });
    }

    fn level(&mut self, map: &Map<String, Value>) -> Vec<Condition> {
        if self.path.len() > DEPTH_MAX {
            self.wrong(format!("a pattern is nested {DEPTH_MAX} deep at most"));
            return Vec::new();
        }
        if map.is_empty() {
            self.wrong("an empty object does not say what to match: name a field");
        }
        let mut level = Vec::new();
        for (field, value) in map {
            self.path.push(field.clone());
            if let Some(condition) = self.field(field, value) {
                level.push(condition);
            }
            self.path.pop();
        }
        level
    }

    fn field(&mut self, field: &str, value: &Value) -> Option<Condition> {
        match value {
            Value::Array(levels) if field == "$or" => {
                if levels.len() < 2 {
                    self.wrong("$or takes two alternatives or more");
                }
                let mut all = Vec::new();
                for level in levels {
                    match level {
                        Value::Object(map) => all.push(self.level(map)),
                        _ => self.wrong("an alternative of $or is an object"),
                    }
                }
                Some(Condition::Or(all))
            }
            Value::Object(map) => Some(Condition::Nested(field.to_owned(), self.level(map))),
            Value::Array(rules) => {
                if rules.is_empty() {
                    self.wrong("an empty array matches nothing: put values or rules into it");
                }
                self.rules += rules.len();
                if self.rules > RULES_MAX {
                    self.wrong(format!("a pattern has {RULES_MAX} rules at most"));
                    return None;
                }
                let rules = rules.iter().filter_map(|rule| self.rule(rule)).collect();
                Some(Condition::Leaf(field.to_owned(), rules))
            }
            _ => {
                self.wrong(format!("has to be an object or an array: write [{value}]"));
                None
            }
        }
    }

    fn rule(&mut self, rule: &Value) -> Option<Rule> {
        let Value::Object(map) = rule else {
            if rule.is_array() {
                self.wrong("an array in an array is not a rule");
                return None;
            }
            return Some(Rule::Equals(rule.clone()));
        };
        let mut members = map.iter();
        let (Some((name, argument)), None) = (members.next(), members.next()) else {
            self.wrong("a rule has exactly one member, such as {\"prefix\": \"a\"}");
            return None;
        };
        match name.as_str() {
            "exists" => match argument.as_bool() {
                Some(wanted) => Some(Rule::Exists(wanted)),
                None => self.refused("exists takes true or false"),
            },
            "numeric" => self.numeric(argument),
            "cidr" => match argument.as_str().and_then(|text| text.parse().ok()) {
                Some(net) => Some(Rule::Cidr(net)),
                None => self.refused("cidr takes a network such as 10.0.0.0/24"),
            },
            "anything-but" => self.anything_but(argument),
            _ => self.text_rule(name, argument),
        }
    }

    fn refused(&mut self, message: impl Into<String>) -> Option<Rule> {
        self.wrong(message);
        None
    }

    fn text_rule(&mut self, name: &str, argument: &Value) -> Option<Rule> {
        let folding = |map: &Map<String, Value>| match map.get("equals-ignore-case") {
            Some(Value::String(text)) if map.len() == 1 => Some(folded(text)),
            _ => None,
        };
        match (name, argument) {
            ("prefix", Value::String(text)) => Some(Rule::Prefix(text.clone(), Case::Counts)),
            ("suffix", Value::String(text)) => Some(Rule::Suffix(text.clone(), Case::Counts)),
            ("equals-ignore-case", Value::String(text)) => Some(Rule::EqualsIgnoreCase(folded(text))),
            ("wildcard", Value::String(text)) => match glob(text) {
                Ok(glob) => Some(Rule::Wildcard(glob)),
                Err(why) => self.refused(why),
            },
            ("prefix", Value::Object(map)) if let Some(text) = folding(map) => {
                Some(Rule::Prefix(text, Case::Ignored))
            }
            ("suffix", Value::Object(map)) if let Some(text) = folding(map) => {
                Some(Rule::Suffix(text, Case::Ignored))
            }
            ("prefix" | "suffix" | "equals-ignore-case" | "wildcard", _) => {
                self.refused(format!("{name} takes a text"))
            }
            _ => self.refused(format!(
                "there is no rule {name}; there are prefix, suffix, anything-but, numeric, exists, \
                 equals-ignore-case, wildcard, cidr"
            )),
        }
    }

    fn anything_but(&mut self, argument: &Value) -> Option<Rule> {
        let rules: Vec<Rule> = match argument {
            Value::Array(values)
                if !values.is_empty() && values.iter().all(|v| !v.is_object() && !v.is_array()) =>
            {
                values.iter().cloned().map(Rule::Equals).collect()
            }
            Value::Object(map) if map.len() == 1 => {
                let (name, argument) = map.iter().next()?;
                let arguments = match argument {
                    Value::Array(all) => all.iter().collect(),
                    one => vec![one],
                };
                arguments.into_iter().filter_map(|one| self.text_rule(name, one)).collect()
            }
            Value::Array(_) | Value::Object(_) => {
                return self
                    .refused("anything-but takes a value, an array of values, or one rule about texts");
            }
            value => vec![Rule::Equals(value.clone())],
        };
        Some(Rule::AnythingBut(rules))
    }

    fn numeric(&mut self, argument: &Value) -> Option<Rule> {
        let pairs = argument.as_array().map_or(&[][..], Vec::as_slice).chunks(2);
        let all: Option<Vec<_>> = pairs
            .map(|pair| match pair {
                [Value::String(how), than] => Comparison::parse(how).zip(than.as_f64()),
                _ => None,
            })
            .collect();
        match all.filter(|all| (1..=2).contains(&all.len())) {
            Some(all) => Some(Rule::Numeric(all)),
            None => self.refused("numeric takes one or two comparisons, such as [\">\", 0, \"<=\", 5]"),
        }
    }
}

fn glob(text: &str) -> Result<Vec<Glob>, String> {
    let (mut glob, mut characters) = (Vec::new(), text.chars());
    while let Some(character) = characters.next() {
        glob.push(match character {
            '*' if glob.last() == Some(&Glob::Anything) => {
                return Err("two stars in a row are one star".into());
            }
            '*' => Glob::Anything,
            '\\' => match characters.next() {
                Some(escaped @ ('*' | '\\')) => Glob::One(escaped),
                _ => return Err("a backslash stands before a star or another backslash".into()),
            },
            other => Glob::One(other),
        });
    }
    Ok(glob)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(pattern: Value, event: Value) -> bool {
        Pattern::parse(&pattern).unwrap().matches(&event)
    }

    #[test]
    fn rules() {
        for (rule, fits, fits_not) in [
            (json!("a"), json!(["a", ["b", "a"]]), json!(["b", 1, null, ["c"]])),
            (json!(1), json!([1, 1.0]), json!(["1", 2])),
            (json!(null), json!([null]), json!(["null", 0])),
            (json!({"prefix": "ab"}), json!(["ab", "abc"]), json!(["a", "AB", 1])),
            (json!({"prefix": {"equals-ignore-case": "aB"}}), json!(["Abc"]), json!(["xab"])),
            (json!({"suffix": ".png"}), json!(["x.png"]), json!(["x.PNG"])),
            (json!({"suffix": {"equals-ignore-case": ".png"}}), json!(["x.PNG"]), json!(["png"])),
            (json!({"equals-ignore-case": "Ab"}), json!(["aB"]), json!(["abc"])),
            (json!({"wildcard": "a*/b*c"}), json!(["a/bc", "axx/byyc"]), json!(["a/b", "abc"])),
            (json!({"wildcard": "\\*"}), json!(["*"]), json!(["x"])),
            (json!({"numeric": [">", 0, "<=", 5]}), json!([0.1, 5]), json!([0, 6, "3"])),
            (json!({"numeric": ["=", 3]}), json!([3, 3.0]), json!([4])),
            (json!({"cidr": "10.0.0.0/24"}), json!(["10.0.0.255"]), json!(["10.0.1.0", "x"])),
            (json!({"exists": true}), json!([1, null, ["x"]]), json!([{"x": 1}])),
            (json!({"anything-but": "a"}), json!(["b", 1]), json!(["a"])),
            (json!({"anything-but": ["a", 1]}), json!(["b", 2]), json!(["a", 1])),
            (json!({"anything-but": {"prefix": "a"}}), json!(["b", 1]), json!(["ab"])),
            (json!({"anything-but": {"suffix": ["x", "y"]}}), json!(["z"]), json!(["ax", "by"])),
            (json!({"anything-but": {"wildcard": "a*c"}}), json!(["ab"]), json!(["abc"])),
        ] {
            for value in fits.as_array().unwrap() {
                assert!(check(json!({"f": [rule]}), json!({"f": value})), "{rule} should fit {value}");
            }
            for value in fits_not.as_array().unwrap() {
                assert!(!check(json!({"f": [rule]}), json!({"f": value})), "{rule} should not fit {value}");
            }
        }
    }

    #[test]
    fn fields_nest_and_all_of_them_count() {
        let event =
            json!({"source": "shop", "detail": {"state": "paid", "items": [{"sku": "a"}, {"sku": "b"}]}});
        for (pattern, fits) in [
            (json!({"source": ["shop"], "detail": {"state": ["paid"]}}), true),
            (json!({"source": ["shop"], "detail": {"state": ["new"]}}), false),
            (json!({"detail": {"items": {"sku": ["b"]}}}), true),
            (json!({"detail": {"items": {"sku": ["c"]}}}), false),
            (json!({"detail": {"voucher": [{"exists": false}]}}), true),
            (json!({"other": {"voucher": [{"exists": false}]}}), true),
            (json!({"other": {"voucher": ["a"]}}), false),
            (json!({"$or": [{"source": ["bank"]}, {"detail": {"state": ["paid"]}}]}), true),
            (json!({"source": ["bank"], "$or": [{"source": ["bank"]}, {"source": ["shop"]}]}), false),
        ] {
            assert_eq!(check(pattern.clone(), event.clone()), fits, "{pattern}");
        }
    }

    #[test]
    fn all_that_is_wrong_is_told_with_its_place() {
        let pattern = json!({"a": "x", "b": {"c": [{"prefxi": "a"}]}, "d": [], "e": [{"numeric": [">", "1"]}],
            "$or": [{"a": [1]}], "f": [{"wildcard": "**"}], "g": {}});
        let problems = Pattern::parse(&pattern).unwrap_err();
        let mut paths: Vec<_> = problems.iter().map(|problem| problem.path.as_str()).collect();
        paths.sort_unstable();
        assert_eq!(paths, ["$or", "a", "b.c", "d", "e", "f", "g"]);
        assert!(problems.iter().any(|problem| problem.message.contains("[\"x\"]")), "{problems:?}");
        assert!(Pattern::parse(&json!([])).is_err());
        let mut deep = json!([1]);
        for _ in 0..100 {
            deep = json!({"a": deep});
        }
        assert!(Pattern::parse(&deep).is_err());
    }

    #[test]
    fn a_wildcard_takes_no_more_than_its_product() {
        let text = "a".repeat(10_000);
        assert!(!check(json!({"f": [{"wildcard": "a*a*a*a*a*a*a*b"}]}), json!({"f": text})));
    }
}
