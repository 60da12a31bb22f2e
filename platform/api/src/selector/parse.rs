//! The query-string form of label selectors: tokens and grammar are upstream's, and so are the messages.

use super::{InvalidSelector, Requirement};
use crate::labels;

const OPERATORS: &str = "in, notin, =, ==, !=, gt, lt";
const SYMBOLS: [&str; 9] = ["==", "!=", ")", ",", "!", "=", ">", "<", "("];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    /// A name or a value; `in` and `notin` are among them.
    Word(&'a str),
    Symbol(&'a str),
    End,
}

impl<'a> Token<'a> {
    fn text(self) -> &'a str {
        match self {
            Self::Word(text) | Self::Symbol(text) => text,
            Self::End => "",
        }
    }
}

fn error(message: impl Into<String>) -> InvalidSelector {
    InvalidSelector(message.into())
}

fn tokens(text: &str) -> Vec<Token<'_>> {
    let is_space = |c: char| matches!(c, ' ' | '\t' | '\r' | '\n');
    let is_symbol = |c: char| "=!(),><".contains(c);
    let (mut rest, mut tokens) = (text.trim_start_matches(is_space), Vec::new());
    while !rest.is_empty() {
        let symbol = SYMBOLS.iter().find(|symbol| rest.starts_with(**symbol));
        let bytes = match symbol {
            Some(symbol) => symbol.len(),
            None => rest.find(|c| is_space(c) || is_symbol(c)).unwrap_or(rest.len()),
        };
        let (token, after) = rest.split_at(bytes);
        tokens.push(if symbol.is_some() { Token::Symbol(token) } else { Token::Word(token) });
        rest = after.trim_start_matches(is_space);
    }
    tokens
}

/// The requirements of a selector.
pub(super) fn requirements(text: &str) -> Result<Vec<Requirement>, InvalidSelector> {
    let mut parser = Parser { tokens: tokens(text), next: 0 };
    let mut requirements = Vec::new();
    loop {
        match parser.peek() {
            Token::Word(_) | Token::Symbol("!") => {}
            Token::End => return Ok(requirements),
            other => {
                let found = other.text();
                return Err(error(format!("found '{found}', expected: !, identifier, or 'end of string'")));
            }
        }
        let requirement = parser.requirement();
        requirements
            .push(requirement.map_err(|why| error(format!("unable to parse requirement: {}", why.0)))?);
        match parser.take() {
            Token::End => return Ok(requirements),
            Token::Symbol(",") => match parser.peek() {
                Token::Word(_) | Token::Symbol("!") => {}
                other => {
                    return Err(error(format!("found '{}', expected: identifier after ','", other.text())));
                }
            },
            other => {
                return Err(error(format!("found '{}', expected: ',' or 'end of string'", other.text())));
            }
        }
    }
}

struct Parser<'a> {
    tokens: Vec<Token<'a>>,
    next: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Token<'a> {
        self.tokens.get(self.next).copied().unwrap_or(Token::End)
    }

    fn take(&mut self) -> Token<'a> {
        let token = self.peek();
        self.next += 1;
        token
    }

    fn requirement(&mut self) -> Result<Requirement, InvalidSelector> {
        let is_negated = self.peek() == Token::Symbol("!");
        if is_negated {
            self.take();
        }
        let key = match self.take() {
            Token::Word(key) => checked_key(key)?,
            other => return Err(error(format!("found '{}', expected: identifier", other.text()))),
        };
        if is_negated {
            return Ok(Requirement::DoesNotExist(key));
        }
        if matches!(self.peek(), Token::End | Token::Symbol(",")) {
            return Ok(Requirement::Exists(key));
        }
        match self.take() {
            Token::Word("in") => {
                let values = checked_values(&key, self.values()?)?;
                Ok(Requirement::In(key, values))
            }
            Token::Word("notin") => {
                let values = checked_values(&key, self.values()?)?;
                Ok(Requirement::NotIn(key, values))
            }
            Token::Symbol("=" | "==") => {
                let values = checked_values(&key, vec![self.value()?])?;
                Ok(Requirement::In(key, values))
            }
            Token::Symbol("!=") => {
                let values = checked_values(&key, vec![self.value()?])?;
                Ok(Requirement::NotIn(key, values))
            }
            Token::Symbol(">") => Ok(Requirement::GreaterThan(key, self.number()?)),
            Token::Symbol("<") => Ok(Requirement::LessThan(key, self.number()?)),
            other => Err(error(format!("found '{}', expected: {OPERATORS}", other.text()))),
        }
    }

    fn value(&mut self) -> Result<String, InvalidSelector> {
        match self.peek() {
            Token::End | Token::Symbol(",") => return Ok(String::new()),
            _ => {}
        }
        match self.take() {
            Token::Word(value) => Ok(value.to_owned()),
            other => Err(error(format!("found '{}', expected: identifier", other.text()))),
        }
    }

    fn number(&mut self) -> Result<i64, InvalidSelector> {
        let value = self.value()?;
        value.parse().map_err(|_| {
            let detail = "for 'Gt', 'Lt' operators, the value must be an integer";
            error(format!("values[0]: Invalid value: {value:?}: {detail}"))
        })
    }

    /// Values in parentheses; a missing one is empty.
    fn values(&mut self) -> Result<Vec<String>, InvalidSelector> {
        match self.take() {
            Token::Symbol("(") => {}
            other => return Err(error(format!("found '{}' expected: '('", other.text()))),
        }
        let mut values = Vec::new();
        match self.peek() {
            Token::Word(_) | Token::Symbol(",") => {}
            Token::Symbol(")") => {
                self.take();
                return Ok(vec![String::new()]);
            }
            other => {
                let found = other.text();
                return Err(error(format!("found '{found}', expected: ',', ')' or identifier")));
            }
        }
        loop {
            match self.take() {
                Token::Word(value) => {
                    values.push(value.to_owned());
                    match self.peek() {
                        Token::Symbol("," | ")") => {}
                        other => {
                            return Err(error(format!("found '{}', expected: ',' or ')'", other.text())));
                        }
                    }
                }
                Token::Symbol(",") => {
                    if values.is_empty() || matches!(self.peek(), Token::Symbol("," | ")")) {
                        values.push(String::new());
                    }
                }
                Token::Symbol(")") => return Ok(values),
                other => {
                    return Err(error(format!("found '{}', expected: ',', or identifier", other.text())));
                }
            }
        }
    }
}

fn checked_key(key: &str) -> Result<String, InvalidSelector> {
    let errors = labels::qualified_name_errors(key);
    match errors.is_empty() {
        true => Ok(key.to_owned()),
        false => Err(error(format!("<nil>: Invalid value: {key:?}: {}", errors.join("; ")))),
    }
}

/// Checks the values of a requirement. Every violation is in the message.
fn checked_values(key: &str, mut values: Vec<String>) -> Result<Vec<String>, InvalidSelector> {
    // A set upstream: the positions in messages are those of the sorted values.
    values.sort();
    values.dedup();
    let wrong = values.iter().enumerate().filter_map(|(at, value)| {
        let why = labels::label_value(value).err()?;
        Some(format!("values[{at}][{key}]: Invalid value: {value:?}: {why}"))
    });
    match wrong.collect::<Vec<_>>().as_slice() {
        [] => Ok(values),
        [one] => Err(error(one.as_str())),
        several => Err(error(format!("[{}]", several.join(", ")))),
    }
}
