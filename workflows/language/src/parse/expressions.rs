//! JSONata expressions in a definition: delimiters and compilation.

use crate::jsonata::{Available, Delimited, Expression, delimited};
use crate::validate::ProblemReport;

/// AWS's message about a string with only one of the delimiters.
pub(crate) const UNMARKED: &str = "JSONata string must start with {% and end with %}";

/// The expression in `{% … %}`; `None` for a plain string. A string with only one of the delimiters, or with blanks
/// outside them, is an error. Blanks inside are optional: the States Language asks for none, and AWS deploys
/// definitions without them.
pub(crate) fn whole(text: &str) -> Result<Option<&str>, String> {
    match delimited(text) {
        Delimited::No => Ok(None),
        Delimited::Invalid(_) => Err(UNMARKED.into()),
        Delimited::Expression(_) => Ok(Some(&text[2..text.len() - 2])),
    }
}

/// Compiles the expression between `{%` and `%}`.
pub(crate) fn compile(
    body: &str,
    there: Available,
    at: &str,
    report: &mut ProblemReport,
) -> Option<Expression> {
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
    fn jsonata_delimiters_are_checked() {
        assert_eq!(whole("plain"), Ok(None));
        assert_eq!(whole("{% 10 %}"), Ok(Some(" 10 ")));
        assert_eq!(whole("{%\n  $x\n%}"), Ok(Some("\n  $x\n")));
        assert_eq!(whole("{%10%}"), Ok(Some("10")));
        assert_eq!(whole("{%$x %}"), Ok(Some("$x ")));
        assert_eq!(whole("{% \n10 %}"), Ok(Some(" \n10 ")));
        for wrong in ["{% 10 %", " {% 10 %}", "{% 10 %} ", "% 10 %}", "{%}", "{%"] {
            assert!(whole(wrong).is_err(), "{wrong}");
        }
    }
}
