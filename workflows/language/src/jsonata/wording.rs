//! Maps errors to the messages of the reference implementation, which AWS passes on: `T2002: The right side of the "+"
//! operator must evaluate to a number`. `jsonata-core` has the same codes, but often other messages.

use super::analysis::Uses;

/// The message of an evaluation error, in the reference's words if they are known.
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
        "D3130" => Some(format!(
            "Formatting or parsing an integer as a sequence starting with \"{text}\" is not supported by this implementation"
        )),
        "D3132" => Some(format!("Unknown component specifier \"{text}\" in date/time picture string")),
        "D3133" => Some(format!(
            "The 'name' modifier can only be applied to months and days in the date/time picture string, not \"{text}\""
        )),
        "T0411" => context(text, uses),
        _ => fixed(code).map(str::to_owned),
    };
    reworded.map_or(message.clone(), |text| format!("{code}: {text}"))
}

/// The message of a parser error: begins with its code; tokens as in the source.
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

/// The reference's messages without values, by code.
fn fixed(code: &str) -> Option<&'static str> {
    const SENTENCES: [(&str, &str); 20] = [
        ("D3001", "Attempting to invoke string function on Infinity or NaN"),
        ("D3020", "Third argument of split function must evaluate to a positive number"),
        ("D3080", "The picture string must only contain a maximum of two sub-pictures"),
        (
            "D3081",
            "The sub-picture must not contain more than one instance of the 'decimal-separator' character",
        ),
        ("D3082", "The sub-picture must not contain more than one instance of the 'percent' character"),
        ("D3083", "The sub-picture must not contain more than one instance of the 'per-mille' character"),
        ("D3084", "The sub-picture must not contain both a 'percent' and a 'per-mille' character"),
        (
            "D3085",
            "The mantissa part of a sub-picture must contain at least one character that is either an 'optional \
             digit character' or a member of the 'decimal digit family'",
        ),
        (
            "D3086",
            "The sub-picture must not contain a passive character that is preceded by an active character and that \
             is followed by another active character",
        ),
        (
            "D3087",
            "The sub-picture must not contain a 'grouping-separator' character that appears adjacent to a \
             'decimal-separator' character",
        ),
        ("D3088", "The sub-picture must not contain a 'grouping-separator' at the end of the integer part"),
        (
            "D3089",
            "The sub-picture must not contain two adjacent instances of the 'grouping-separator' character",
        ),
        (
            "D3090",
            "The integer part of the sub-picture must not contain a member of the 'decimal digit family' that is \
             followed by an instance of the 'optional digit character'",
        ),
        (
            "D3091",
            "The fractional part of the sub-picture must not contain an instance of the 'optional digit character' \
             that is followed by a member of the 'decimal digit family'",
        ),
        (
            "D3092",
            "A sub-picture that contains a 'percent' or 'per-mille' character must not contain a character treated \
             as an 'exponent-separator'",
        ),
        (
            "D3093",
            "The exponent part of the sub-picture must comprise only of one or more characters that are members of \
             the 'decimal digit family'",
        ),
        ("D3131", "In a decimal digit pattern, all digits must be from the same decimal group"),
        ("D3134", "The timezone integer format specifier cannot have more than four digits"),
        ("D3135", "No matching closing bracket ']' in date/time picture string"),
        ("D3136", "The date/time picture string is missing specifiers required to parse the timestamp"),
    ];
    SENTENCES.iter().find(|(known, _)| *known == code).map(|(_, sentence)| *sentence)
}

/// `Context value at argument 1 does not match function signature (expected String)`.
fn context(text: &str, uses: &Uses) -> Option<String> {
    let named = text.rsplit_once(" of function ").map(|(_, name)| name.trim_start_matches('$'));
    let function = named.or_else(|| uses.only_function())?;
    let position = text.split_once("argument ").and_then(|(_, rest)| rest.split(' ').next()).unwrap_or("1");
    Some(format!(
        "Context value is not a compatible type with argument {position} of function \"{function}\""
    ))
}

/// `Argument 1 must be String`, `Argument count mismatch: expected 2, got 1`,
/// `Argument 1 of function $join does not match function signature (expected String)`.
fn signature(text: &str, uses: &Uses) -> Option<String> {
    if let Some((position, rest)) =
        text.strip_prefix("Argument ").and_then(|rest| rest.split_once(" of function "))
        && let Some((name, _)) = rest.split_once(" does not match function signature")
        && !name.starts_with('"')
    {
        let name = name.trim_start_matches('$');
        return Some(format!("Argument {position} of function \"{name}\" does not match function signature"));
    }
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
    // Some name the function: `Argument 1 of function $join must be an array of String`.
    let (position, named) = match position.split_once(" of function") {
        Some((position, name)) => {
            (position, Some(name.trim_start_matches([' ', '$'])).filter(|n| !n.is_empty()))
        }
        None => (position, None),
    };
    let function = named.or_else(|| uses.only_function())?.trim_matches('"');
    let item = item.trim_matches('"').to_lowercase();
    let items = if item.ends_with('s') { item } else { format!("{item}s") };
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
    fn errors_have_the_messages_of_the_reference() {
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
            (
                "$join([1])",
                "T0412: Argument 1 of function $join must be an array of String",
                "T0412: Argument 1 of function \"join\" must be an array of \"strings\"",
            ),
            (
                "$a($b())",
                "T0410: Argument 2 of function $join does not match function signature (expected String)",
                "T0410: Argument 2 of function \"join\" does not match function signature",
            ),
            (
                "$formatInteger(1, 'x')",
                "D3130: x",
                "D3130: Formatting or parsing an integer as a sequence starting with \"x\" is not supported by this \
                 implementation",
            ),
            (
                "$formatNumber(1, '#0#')",
                "D3090: Optional digit (#) cannot appear after mandatory digit (0) in integer part",
                "D3090: The integer part of the sub-picture must not contain a member of the 'decimal digit family' \
                 that is followed by an instance of the 'optional digit character'",
            ),
            (
                "$substringBefore('a')",
                "T0411: Context value is not a compatible type with argument 2 of function substringBefore",
                "T0411: Context value is not a compatible type with argument 2 of function \"substringBefore\"",
            ),
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
