//! JSONata expressions in a definition: how they are marked, and compiling them.

use crate::jsonata::{Available, Delimited, Expression, delimited};
use crate::validate::Report;

/// AWS's sentence about a string that is only half an expression.
pub(crate) const UNMARKED: &str = "JSONata string must start with {% and end with %}";

/// The expression in `{% … %}`; `None` for a plain string. A string that opens or
/// closes without the other, or without room around the expression, is a mistake.
pub(crate) fn whole(text: &str) -> Result<Option<&str>, String> {
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
    Ok(Some(body))
}

/// Compiles the inside of `{% … %}`.
pub(crate) fn compile(body: &str, there: Available, at: &str, report: &mut Report) -> Option<Expression> {
    match Expression::compile_for(body, there) {
        Ok(expression) => Some(expression),
        Err(problem) => {
            report.problem(at, problem);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks() {
        assert_eq!(whole("plain"), Ok(None));
        assert_eq!(whole("{% 10 %}"), Ok(Some(" 10 ")));
        assert_eq!(whole("{%\n  $x\n%}"), Ok(Some("\n  $x\n")));
        for wrong in ["{%10%}", "{% 10 %", " {% 10 %}", "{% 10 %} ", "% 10 %}", "{%}", "{% \n10 %}", "{%"] {
            assert!(whole(wrong).is_err(), "{wrong}");
        }
    }
}
