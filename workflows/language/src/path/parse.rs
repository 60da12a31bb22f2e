//! The grammar of paths: `$`, `$$` or `$name`, then `.name`, `['name']`, `[0]`, `[1:2]`, `[*]`, `..`, `[?(…)]`.

use std::sync::Arc;

use super::{PATH_CHARS_MAX, Path, PathSegment, Root, filter, function::PathFunction};
use crate::error::Problem;

/// Parses a path.
pub(super) fn path(text: &str) -> Result<Path, Problem> {
    if text.len() > PATH_CHARS_MAX {
        return Err(Problem::here(format!("A path has at most {PATH_CHARS_MAX} characters")));
    }
    let mut cursor = Cursor::new(text);
    let path = prefix(&mut cursor, text)?;
    cursor.skip_space();
    if !cursor.is_at_end() {
        return Err(cursor.problem("Could not parse token"));
    }
    Ok(path)
}

/// Parses a path at the cursor, up to its end (an argument's `,` or `)`, a filter's operator).
pub(crate) fn prefix(cursor: &mut Cursor<'_>, source: &str) -> Result<Path, Problem> {
    let from = cursor.at;
    if !cursor.eat('$') && !cursor.eat('@') {
        return Err(Problem::here(format!("Path must start with '$': {source}")));
    }
    let root = if cursor.eat('$') {
        Root::Context
    } else {
        match cursor.name() {
            "" => Root::Input,
            name => Root::Variable(name.into()),
        }
    };
    let steps = steps(cursor)?;
    let definite = steps.iter().enumerate().all(|(at, step)| match step {
        PathSegment::Property(_) | PathSegment::Index(_) | PathSegment::Function(_) => true,
        PathSegment::Properties(_) => at + 1 == steps.len(),
        _ => false,
    }) || matches!(steps.last(), Some(PathSegment::Function(_)));
    Ok(Path { source: cursor.text[from..cursor.at].into(), root, steps: steps.into(), definite })
}

fn steps(cursor: &mut Cursor<'_>) -> Result<Vec<PathSegment>, Problem> {
    let mut steps = Vec::new();
    loop {
        if cursor.eat_text("..") {
            let step = if cursor.eat('[') { bracket(cursor)? } else { dotted(cursor)? };
            steps.push(PathSegment::Descend(Box::new(step)));
        } else if cursor.eat('.') {
            // Jayway treats `.[` like `[`.
            let step = if cursor.eat('[') { bracket(cursor)? } else { dotted(cursor)? };
            steps.push(step);
        } else if cursor.eat('[') {
            steps.push(bracket(cursor)?);
        } else {
            return Ok(steps);
        }
    }
}

/// Characters that end a name in dot notation.
fn ends_name(letter: char) -> bool {
    matches!(
        letter,
        '.' | '[' | ']' | '(' | ')' | ',' | ' ' | '\'' | '"' | '=' | '<' | '>' | '!' | '&' | '|' | '~'
    )
}

fn dotted(cursor: &mut Cursor<'_>) -> Result<PathSegment, Problem> {
    if cursor.eat('*') {
        return Ok(PathSegment::Wildcard);
    }
    let name = cursor.take_while(|letter| !ends_name(letter));
    if name.is_empty() {
        return Err(cursor.problem("Path must not end with a '.' or '..'"));
    }
    if cursor.peek() != Some('(') {
        return Ok(PathSegment::Property(name.into()));
    }
    let Some(function) = PathFunction::named(name) else {
        return Err(cursor.problem(&format!("Function of name: {name} cannot be created")));
    };
    cursor.eat('(');
    cursor.skip_space();
    if !cursor.eat(')') {
        return Err(cursor.problem(&format!("Function {name} takes no arguments")));
    }
    Ok(PathSegment::Function(function))
}

/// Parses up to the `]`; the `[` has been consumed.
fn bracket(cursor: &mut Cursor<'_>) -> Result<PathSegment, Problem> {
    cursor.skip_space();
    let step = match cursor.peek() {
        Some('*') => {
            cursor.eat('*');
            PathSegment::Wildcard
        }
        Some('?') => {
            cursor.eat('?');
            PathSegment::Filter(filter::parse(cursor)?)
        }
        Some('(') => script(cursor)?,
        Some('\'' | '"') => names(cursor)?,
        Some(':' | '-' | '0'..='9') => positions(cursor)?,
        _ => return Err(cursor.problem("Could not parse token")),
    };
    cursor.skip_space();
    if !cursor.eat(']') {
        return Err(cursor.problem("Expected ']'"));
    }
    Ok(step)
}

/// `(@.length-1)`, the only script in common use: an index from the end.
fn script(cursor: &mut Cursor<'_>) -> Result<PathSegment, Problem> {
    let text = cursor.take_while(|letter| letter != ']');
    let inner: String = text.chars().filter(|letter| !letter.is_whitespace()).collect();
    let back = inner
        .strip_prefix("(@.length-")
        .or_else(|| inner.strip_prefix("(@.length()-"))
        .and_then(|rest| rest.strip_suffix(')'))
        .and_then(|digits| digits.parse::<i64>().ok());
    match back {
        Some(back) if back > 0 => Ok(PathSegment::Index(-back)),
        _ => Err(cursor.problem("Expected (@.length-n)")),
    }
}

fn names(cursor: &mut Cursor<'_>) -> Result<PathSegment, Problem> {
    let mut names: Vec<Arc<str>> = Vec::new();
    loop {
        cursor.skip_space();
        names.push(cursor.unescaped()?.into());
        cursor.skip_space();
        if !cursor.eat(',') {
            break;
        }
    }
    Ok(if names.len() == 1 { PathSegment::Property(names.remove(0)) } else { PathSegment::Properties(names) })
}

fn positions(cursor: &mut Cursor<'_>) -> Result<PathSegment, Problem> {
    let first = cursor.integer()?;
    cursor.skip_space();
    if cursor.eat(':') {
        cursor.skip_space();
        let to = cursor.integer()?;
        // Jayway parses a third part and ignores it.
        if cursor.eat(':') {
            cursor.integer()?;
        }
        return Ok(PathSegment::Slice { from: first, to });
    }
    let mut indexes = vec![first.ok_or_else(|| cursor.problem("Expected an index"))?];
    loop {
        cursor.skip_space();
        if !cursor.eat(',') {
            break;
        }
        cursor.skip_space();
        indexes.push(cursor.integer()?.ok_or_else(|| cursor.problem("Expected an index"))?);
    }
    Ok(if indexes.len() == 1 { PathSegment::Index(indexes[0]) } else { PathSegment::Indexes(indexes) })
}

/// A position in a text.
pub(crate) struct Cursor<'a> {
    pub(crate) text: &'a str,
    pub(crate) at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        Self { text, at: 0 }
    }

    pub(crate) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    pub(crate) fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.at == self.text.len()
    }

    pub(crate) fn eat(&mut self, letter: char) -> bool {
        let found = self.peek() == Some(letter);
        if found {
            self.at += letter.len_utf8();
        }
        found
    }

    pub(crate) fn eat_text(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        if found {
            self.at += text.len();
        }
        found
    }

    pub(crate) fn take_while(&mut self, accepts: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let len = rest.find(|letter| !accepts(letter)).unwrap_or(rest.len());
        self.at += len;
        &rest[..len]
    }

    pub(crate) fn skip_space(&mut self) {
        self.take_while(char::is_whitespace);
    }

    /// The name of a variable: letters, digits and underscores, not beginning with a digit.
    fn name(&mut self) -> &'a str {
        match self.peek() {
            Some(letter) if letter.is_alphabetic() || letter == '_' => {
                self.take_while(|letter| letter.is_alphanumeric() || letter == '_')
            }
            _ => "",
        }
    }

    /// A whole number; `None` if there is none at the cursor.
    fn integer(&mut self) -> Result<Option<i64>, Problem> {
        let from = self.at;
        self.eat('-');
        self.take_while(|letter| letter.is_ascii_digit());
        match &self.text[from..self.at] {
            "" => Ok(None),
            digits => digits.parse().map(Some).map_err(|_| self.problem("Expected an index")),
        }
    }

    /// A name or string of a path, in single or double quotes, with Jayway's escapes: `\n`, `\t`, `\r`, `\f`, `\b`,
    /// `\uXXXX`; a backslash takes any other character as it is.
    pub(crate) fn unescaped(&mut self) -> Result<String, Problem> {
        let from = self.at + 1;
        self.quoted()?;
        let mut text = String::new();
        let mut letters = self.text[from..self.at - 1].chars();
        while let Some(letter) = letters.next() {
            if letter != '\\' {
                text.push(letter);
                continue;
            }
            match letters.next() {
                Some('n') => text.push('\n'),
                Some('t') => text.push('\t'),
                Some('r') => text.push('\r'),
                Some('f') => text.push('\u{c}'),
                Some('b') => text.push('\u{8}'),
                Some('u') => {
                    let digits: String = letters.by_ref().take(4).collect();
                    let code = u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32);
                    text.push(code.ok_or_else(|| self.problem("Expected four hexadecimal digits"))?);
                }
                other => text.extend(other),
            }
        }
        Ok(text)
    }

    /// A string in single or double quotes; a backslash keeps the next character unchanged.
    pub(crate) fn quoted(&mut self) -> Result<String, Problem> {
        let quote = match self.peek() {
            Some(quote @ ('\'' | '"')) => quote,
            _ => return Err(self.problem("Expected a quoted name")),
        };
        self.at += 1;
        let mut text = String::new();
        let mut letters = self.rest().char_indices();
        while let Some((at, letter)) = letters.next() {
            if letter == quote {
                self.at += at + 1;
                return Ok(text);
            }
            match (letter, letter == '\\') {
                (_, false) => text.push(letter),
                (_, true) => text.extend(letters.next().map(|(_, escaped)| escaped)),
            }
        }
        Err(self.problem("Property has not been closed - missing closing quote"))
    }

    pub(crate) fn problem(&self, what: &str) -> Problem {
        Problem::here(format!("{what} at position {} in '{}'", self.at, self.text))
    }
}
