//! Errors in the words of the reference implementation, which AWS hands on: `T2002: The right side of the "+" operator
//! must evaluate to a number`. `jsonata-core` has the same codes and often other words.

use super::analysis::Uses;

/// An error of an evaluation, in the reference's words as far as they can be known.
pub(super) fn of_evaluation(message: &str, uses: &Uses) -> String {
    let message = of_compilation(message);
    let Some((code, text)) = message.split_once(": ") else { return message };
    let reworded = match code {
        "T0410" => signature(text, uses),
        "T0412" => list_of(text, uses),
        "T1006" => Some("Attempted to invoke a non-function".to_owned()),
        "T2001" | "T2002" => operand(code, text),
        "T2003" => Some("The left side of the range operator (..) must evaluate to an integer".to_owned()),
        "T2004" => Some("The right side of the range operator (..) must evaluate to an integer".to_owned()),
        "T2010" => uses.only_comparison().map(|operator| {
            format!("The expressions either side of operator \"{operator}\" must evaluate to numeric or string values")
        }),
        "D1001" if text == "Number out of range" => Some("Number out of range: null".to_owned()),
        "D3010" => Some("Second argument of replace function cannot be an empty string".to_owned()),
        "D3030" => between(text, "Cannot convert '", "' to number")
            .map(|value| format!("Unable to cast value to a number: \"{value}\"")),
        "D3100" => text.rsplit(' ').next().map(|given| {
            format!("The radix of the formatBase function must be between 2 and 36.  It was given {given}")
        }),
        "D3138" | "D3139" => text.rsplit_once(" (").map(|(sentence, _)| sentence.to_owned()),
        _ => None,
    };
    reworded.map_or(message.clone(), |text| format!("{code}: {text}"))
}

/// An error of the parser: from its code on, tokens as they are written.
pub(super) fn of_compilation(message: &str) -> String {
    if message.starts_with("Unclosed comment") {
        return "S0106: Comment has no closing tag".to_owned();
    }
    const WORDS: [&str; 3] = ["Invalid syntax: ", "Invalid number: ", "Signature validation failed: "];
    let message = WORDS.iter().find_map(|word| message.strip_prefix(word)).unwrap_or(message);
    let quoted = |name: &str| token(name).map(|token| format!("\"{token}\""));
    if let Some(name) = message.strip_prefix("S0201: Syntax error: ")
        && let Some(token) = quoted(name)
    {
        return format!("S0201: Syntax error: {token}");
    }
    if let Some(name) = between(message, "S0211: The symbol ", " cannot be used as a unary operator")
        && let Some(token) = quoted(name)
    {
        return format!("S0211: The symbol {token} cannot be used as a unary operator");
    }
    if let Some(name) = between(message, "S0203: Expected ", " before end of expression")
        && let Some(token) = quoted(name)
    {
        return format!("S0203: Expected {token} before end of expression");
    }
    if let Some((expected, got)) =
        message.strip_prefix("S0202: Expected ").and_then(|rest| rest.split_once(", got "))
        && let (Some(expected), Some(got)) = (quoted(expected), quoted(got))
    {
        return format!("S0202: Expected {expected}, got {got}");
    }
    message.to_owned()
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    text.strip_prefix(before)?.strip_suffix(after)
}

/// `Argument 1 must be String`, `Argument count mismatch: expected 2, got 1`.
fn signature(text: &str, uses: &Uses) -> Option<String> {
    let function = uses.only_function()?;
    let position = if let Some(rest) = text.strip_prefix("Argument count mismatch: expected ") {
        let (expected, got) = rest.split_once(", got ")?;
        let (expected, got): (usize, usize) = (expected.parse().ok()?, got.parse().ok()?);
        expected.min(got) + 1
    } else {
        text.strip_prefix("Argument ")?.split_once(" must be ")?.0.parse().ok()?
    };
    Some(format!("Argument {position} of function \"{function}\" does not match function signature"))
}

/// `Argument 1 must be an array of Number`.
fn list_of(text: &str, uses: &Uses) -> Option<String> {
    let (position, item) = text.strip_prefix("Argument ")?.split_once(" must be an array of ")?;
    let function = uses.only_function()?;
    let items = format!("{}s", item.to_lowercase());
    Some(format!("Argument {position} of function \"{function}\" must be an array of \"{items}\""))
}

/// `The left side of the + operator must evaluate to a number`.
fn operand(code: &str, text: &str) -> Option<String> {
    let side = if code == "T2001" { "left" } else { "right" };
    let operator = between(text, &format!("The {side} side of the "), " operator must evaluate to a number")?;
    Some(format!("The {side} side of the \"{operator}\" operator must evaluate to a number"))
}

/// The text of a token, from its name in `jsonata-core`'s parser.
fn token(name: &str) -> Option<String> {
    const TOKENS: [(&str, &str); 34] = [
        ("LeftParen", "("),
        ("RightParen", ")"),
        ("LeftBracket", "["),
        ("RightBracket", "]"),
        ("LeftBrace", "{"),
        ("RightBrace", "}"),
        ("Comma", ","),
        ("Semicolon", ";"),
        ("Colon", ":"),
        ("ColonEqual", ":="),
        ("Dot", "."),
        ("DotDot", ".."),
        ("Question", "?"),
        ("QuestionQuestion", "??"),
        ("QuestionColon", "?:"),
        ("Plus", "+"),
        ("Minus", "-"),
        ("Star", "*"),
        ("StarStar", "**"),
        ("Slash", "/"),
        ("Percent", "%"),
        ("Equal", "="),
        ("NotEqual", "!="),
        ("LessThan", "<"),
        ("LessThanOrEqual", "<="),
        ("GreaterThan", ">"),
        ("GreaterThanOrEqual", ">="),
        ("Ampersand", "&"),
        ("TildeArrow", "~>"),
        ("Caret", "^"),
        ("Hash", "#"),
        ("At", "@"),
        ("Pipe", "|"),
        ("Eof", "(end)"),
    ];
    if let Some((_, token)) = TOKENS.iter().find(|(known, _)| *known == name) {
        return Some((*token).to_owned());
    }
    // `Number(1.0)`, `Identifier("a")`, `String("a")`.
    let (kind, rest) = name.split_once('(')?;
    let inner = rest.strip_suffix(')')?;
    match kind {
        "Number" => Some(inner.strip_suffix(".0").unwrap_or(inner).to_owned()),
        "Identifier" | "String" | "Variable" => Some(inner.trim_matches('"').to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_reference() {
        let reworded = |source: &str, message: &str| {
            let ast = jsonata_core::parser::parse(source).expect("valid");
            of_evaluation(message, &Uses::of(&ast))
        };
        for (source, message, expected) in [
            (
                "1+'a'",
                "T2002: The right side of the + operator must evaluate to a number",
                "T2002: The right side of the \"+\" operator must evaluate to a number",
            ),
            (
                "$uppercase(1)",
                "T0410: Argument 1 must be String",
                "T0410: Argument 1 of function \"uppercase\" does not match function signature",
            ),
            (
                "$map(1)",
                "T0410: Argument count mismatch: expected 2, got 1",
                "T0410: Argument 2 of function \"map\" does not match function signature",
            ),
            (
                "$sum(['a'])",
                "T0412: Argument 1 must be an array of Number",
                "T0412: Argument 1 of function \"sum\" must be an array of \"numbers\"",
            ),
            (
                "1 < true",
                "T2010: Cannot compare number and boolean",
                "T2010: The expressions either side of operator \"<\" must evaluate to numeric or string values",
            ),
            (
                "$f()",
                "T1006: Attempted to invoke a non-function: $f",
                "T1006: Attempted to invoke a non-function",
            ),
            (
                "$number('x')",
                "D3030: Cannot convert 'x' to number",
                "D3030: Unable to cast value to a number: \"x\"",
            ),
            ("$a($b())", "T0410: Argument 1 must be String", "T0410: Argument 1 must be String"),
            ("1", "no code at all", "no code at all"),
        ] {
            assert_eq!(reworded(source, message), expected, "{source}");
        }
    }

    #[test]
    fn tokens_are_written_out() {
        for (message, expected) in [
            (
                "S0203: Expected RightBracket before end of expression",
                "S0203: Expected \"]\" before end of expression",
            ),
            // Measured on AWS: floci-io/floci#2745.
            (
                "S0211: The symbol RightBrace cannot be used as a unary operator",
                "S0211: The symbol \"}\" cannot be used as a unary operator",
            ),
            ("S0201: Syntax error: Number(1.0)", "S0201: Syntax error: \"1\""),
            ("S0202: Expected RightParen, got Comma", "S0202: Expected \")\", got \",\""),
            ("Unclosed comment", "S0106: Comment has no closing tag"),
            ("Invalid syntax: S0209: x", "S0209: x"),
        ] {
            assert_eq!(of_compilation(message), expected);
        }
    }
}
