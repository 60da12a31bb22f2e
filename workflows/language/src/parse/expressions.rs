//! JSONata expressions in a definition: how they are marked, and compiling them.

use crate::jsonata::{Delimited, Expression, delimited};
use crate::validate::Report;

/// AWS's sentence about a string that is only half an expression.
pub(crate) const UNMARKED: &str = "JSONata string must start with {% and end with %}";

/// The expression in `{% … %}`; `None` for a plain string. A string that opens or
/// closes without the other, or without room around the expression, is a mistake;
/// so is asking for the error where none was caught.
pub(crate) fn whole(text: &str, in_catch: bool) -> Result<Option<&str>, String> {
    match delimited(text) {
        Delimited::No => return Ok(None),
        Delimited::Broken(_) => return Err(UNMARKED.into()),
        Delimited::Expression(_) => {}
    }
    let body = &text[2..text.len() - 2];
    let roomy = body.starts_with(char::is_whitespace) && body.ends_with(char::is_whitespace);
    let stray = body.strip_prefix(' ').is_some_and(|rest| rest.trim_start_matches(' ').starts_with('\n'));
    if !roomy || stray {
        return Err(UNMARKED.into());
    }
    if !in_catch && body.contains("$states.errorOutput") {
        return Err("The variable '$states.errorOutput' is only available in 'Catch'".into());
    }
    Ok(Some(body))
}

/// Compiles the inside of `{% … %}`.
pub(crate) fn compile(body: &str, at: &str, report: &mut Report) -> Option<Expression> {
    match Expression::compile(body) {
        Ok(expression) => Some(expression),
        Err(problem) => {
            report.schema(at, problem.message);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks() {
        assert_eq!(whole("plain", false), Ok(None));
        assert_eq!(whole("{% 10 %}", false), Ok(Some(" 10 ")));
        assert_eq!(whole("{%\n  $x\n%}", false), Ok(Some("\n  $x\n")));
        for wrong in ["{%10%}", "{% 10 %", " {% 10 %}", "{% 10 %} ", "% 10 %}", "{%}", "{% \n10 %}", "{%"] {
            assert!(whole(wrong, false).is_err(), "{wrong}");
        }
        let caught = "{% $states.errorOutput.Cause %}";
        assert!(whole(caught, false).is_err() && whole(caught, true).is_ok());
    }
}
