//! JSONata expressions in a definition: how they are marked, and compiling them.

use crate::jsonata::Expression;
use crate::validate::Report;

/// The expression in `{% … %}`; `None` for a plain string. A string that opens or
/// closes without the other, or without room around the expression, is a mistake.
pub(crate) fn whole(text: &str) -> Result<Option<&str>, String> {
    let (opens, closes) = (text.starts_with("{%"), text.ends_with("%}"));
    if !opens && !closes {
        return Ok(None);
    }
    let body = text.strip_prefix("{%").and_then(|rest| rest.strip_suffix("%}")).filter(|_| text.len() >= 4);
    let Some(body) = body else {
        return Err(
            "Improperly opened or closed JSONata expression: expressions must be enclosed in '{% %}'".into(),
        );
    };
    let roomy = body.starts_with(char::is_whitespace) && body.ends_with(char::is_whitespace);
    let stray = body.strip_prefix(' ').is_some_and(|rest| rest.trim_start_matches(' ').starts_with('\n'));
    match roomy && !stray {
        true => Ok(Some(body)),
        false => Err("JSONata expressions must be separated from '{%' and '%}' by one space".into()),
    }
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
        assert_eq!(whole("plain"), Ok(None));
        assert_eq!(whole("{% 10 %}"), Ok(Some(" 10 ")));
        assert_eq!(whole("{%\n  $x\n%}"), Ok(Some("\n  $x\n")));
        for wrong in ["{%10%}", "{% 10 %", " {% 10 %}", "{% 10 %} ", "% 10 %}", "{%}", "{% \n10 %}", "{%"] {
            assert!(whole(wrong).is_err(), "{wrong}");
        }
    }
}
