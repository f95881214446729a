//! The chat template of a model folder, rendered as transformers renders it.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{AutoEscape, Environment, escape_formatter};
use serde::{Deserialize, Serialize};

use super::read_text;
use crate::{Error, ErrorKind, Result};

/// Largest template or tokenizer configuration that is read.
const TEMPLATE_CAP: u64 = 16 << 20;
/// Instructions a template may execute: far beyond any real template, far below a second.
const FUEL: u64 = 10_000_000;
/// Special tokens of `tokenizer_config.json` that templates see as variables.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`, or another role the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of the role `user`.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".into(), content: content.into() }
    }
}

/// A compiled chat template: messages become the text of a prompt.
///
/// It runs sandboxed: it sees the messages and the model's special tokens, cannot read files, and stops after a fixed
/// number of instructions.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Where the template stands: `chat_template.jinja` or `tokenizer_config.json`.
    path: PathBuf,
    special_tokens: Vec<(&'static str, String)>,
}

impl ChatTemplate {
    /// Opens the template of a model folder: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`
    /// (a string, or a list of named templates of which `default` is taken); `None` where there is neither.
    ///
    /// # Errors
    /// [`ErrorKind::Io`], [`ErrorKind::Format`] or [`ErrorKind::Config`] where a file cannot be read, and
    /// [`ErrorKind::Text`] with file and line where the template does not compile.
    pub fn open(dir: &Path) -> Result<Option<Self>> {
        let config_path = dir.join("tokenizer_config.json");
        let config: serde_json::Value = match read_text(&config_path, TEMPLATE_CAP)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|error| Error::new(ErrorKind::Config, format!("`{}`: {error}", config_path.display())))?,
            None => serde_json::Value::Null,
        };
        let template_path = dir.join("chat_template.jinja");
        let (path, source) = match read_text(&template_path, TEMPLATE_CAP)? {
            Some(source) => (template_path, source),
            None => match config_template(&config["chat_template"]) {
                Some(source) => (config_path, source.to_owned()),
                None => return Ok(None),
            },
        };
        let special_tokens =
            SPECIAL_TOKENS.iter().filter_map(|name| Some((*name, special_token(&config[*name])?.to_owned()))).collect();
        Self::compile(path, source, special_tokens).map(Some)
    }

    /// The prompt for `messages`, up to the point where the assistant answers (`add_generation_prompt`).
    ///
    /// # Errors
    /// [`ErrorKind::Text`] with file and line where the template fails or refuses the messages (`raise_exception`).
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        let mut context: Vec<(&str, Value)> = vec![
            ("messages", Value::from(Serde(messages.to_vec()))),
            ("add_generation_prompt", true.into()),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
        ];
        context.extend(self.special_tokens.iter().map(|(name, token)| (*name, Value::from(token.as_str()))));
        self.environment
            .get_template("chat")
            .and_then(|template| template.render(Value::from_pairs(context)))
            .map_err(|error| located(&self.path, &error))
    }

    fn compile(path: PathBuf, source: String, special_tokens: Vec<(&'static str, String)>) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| located(&path, &error))?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, state, value| match python_word(value) {
            Some(word) => out.write_str(word).map_err(minijinja::Error::from),
            None => escape_formatter(out, state, value),
        });
        environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(refused(message))
        });
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", tojson);
        environment.add_template_owned("chat", source).map_err(|error| located(&path, &error))?;
        Ok(Self { environment, path, special_tokens })
    }
}

/// `chat_template` of `tokenizer_config.json`: one template, or `[{"name", "template"}]`.
fn config_template(value: &serde_json::Value) -> Option<&str> {
    value.as_str().or_else(|| {
        value.as_array()?.iter().find(|entry| entry["name"] == "default").and_then(|entry| entry["template"].as_str())
    })
}

/// A special token is written as a string or as an added token with its properties.
fn special_token(value: &serde_json::Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

/// An error with the file, the line where it is known, and every cause.
fn located(path: &Path, error: &minijinja::Error) -> Error {
    let mut context = format!("`{}`", path.display());
    if let Some(line) = error.line() {
        context += &format!(" line {line}");
    }
    context += &format!(": {}", error.detail().map_or_else(|| error.kind().to_string(), str::to_owned));
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        context += &format!(": {inner}");
        cause = inner.source();
    }
    Error::new(ErrorKind::Text, context)
}

fn refused(message: impl Into<std::borrow::Cow<'static, str>>) -> minijinja::Error {
    minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message)
}

/// Templates were written against Python, which prints these three with a capital.
fn python_word(value: &Value) -> Option<&'static str> {
    match value.kind() {
        ValueKind::None => Some("None"),
        ValueKind::Bool => Some(if value.is_true() { "True" } else { "False" }),
        _ => None,
    }
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False, indent=indent)` writes it; nothing is escaped for HTML.
fn tojson(value: Value, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let failed = |error: serde_json::Error| refused(format!("tojson: {error}"));
    match indent {
        Some(width) if width > 64 => Err(refused("tojson: indent over 64")),
        Some(width) => {
            let mut out = Vec::new();
            let indent = vec![b' '; width];
            let pretty = serde_json::ser::PrettyFormatter::with_indent(&indent);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, pretty)).map_err(failed)?;
            String::from_utf8(out).map_err(|error| refused(error.to_string()))
        }
        None => {
            let mut out = Vec::new();
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Spaced)).map_err(failed)?;
            String::from_utf8(out).map_err(|error| refused(error.to_string()))
        }
    }
}

/// Python's separators: a space after each comma and colon.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// The current time (UTC) in the subset of `strftime` that chat templates use.
fn strftime_now(format: String) -> Result<String, minijinja::Error> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    strftime(&format, seconds)
}

fn strftime(format: &str, seconds: u64) -> Result<String, minijinja::Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let (year, month, day) = civil_date(seconds / 86_400);
    let name = MONTHS[month - 1];
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        out += &match chars.next() {
            Some('Y') => year.to_string(),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('B') => name.to_owned(),
            Some('b') => name[..3].to_owned(),
            Some('H') => format!("{hour:02}"),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{second:02}"),
            Some('%') => "%".to_owned(),
            other => return Err(refused(format!("strftime_now: `%{}` is not supported", other.unwrap_or(' ')))),
        };
    }
    Ok(out)
}

/// Year, month and day of a number of days since 1 January 1970 (Howard Hinnant, `civil_from_days`).
fn civil_date(days: u64) -> (u64, usize, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month as usize, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> Result<ChatTemplate> {
        ChatTemplate::compile("chat_template.jinja".into(), source.into(), vec![("bos_token", "<s>".into())])
    }

    fn render(source: &str) -> String {
        let messages = [Message { role: "system".into(), content: "Be <brief> & kind".into() }, Message::user("hi")];
        template(source).and_then(|template| template.render(&messages)).unwrap()
    }

    #[test]
    fn templates_render_as_transformers_renders_them() {
        let cases = [
            ("{{ messages[-1]['content'] + '\\n' }}", "hi\n"),
            ("{{ messages[-1].content }}\n", "hi"),
            ("{{ messages[0]['content'] }}", "Be <brief> & kind"),
            ("{{ bos_token }}{{ eos_token is defined }}", "<s>False"),
            ("{{ none }} {{ true }} {{ [1, 2] | length }}", "None True 2"),
            ("{% for m in messages %}\n  {% if loop.last %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n", "user\n"),
            ("{% if add_generation_prompt %}go{% endif %}", "go"),
            ("{{ tools is none }}{% if not tools %}!{% endif %}", "True!"),
            ("{{ messages[0].content.split('<')[0].strip().upper() }}", "BE"),
            ("{{ messages[1:][0]['role'].startswith('us') }}", "True"),
            ("{{ messages[::-1][0].content }}", "hi"),
            ("{{ {'a': [1, '<ü>']} | tojson }}", "{\"a\": [1, \"<ü>\"]}"),
            ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "2",
            ),
            (
                "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
                "system",
            ),
            ("{% macro shout(x) %}{{ x | upper }}{% endmacro %}{{ shout('a') }}", "A"),
            ("{%- if messages[0]['role'] == 'system' -%}\n  S\n{%- endif %}", "S"),
        ];
        let wrong: Vec<_> = cases
            .iter()
            .map(|(source, expected)| (source, *expected, render(source)))
            .filter(|(_, expected, got)| expected != got)
            .collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn a_refusal_names_file_line_and_reason() {
        let template = template("\n\n{{ raise_exception('roles must alternate') }}").unwrap();
        let error = template.render(&[]).unwrap_err().to_string();
        assert_eq!(error, "`chat_template.jinja` line 3: roles must alternate");
    }

    #[test]
    fn a_syntax_error_names_file_and_line() {
        let error = template("a\n{% if %}").err().unwrap().to_string();
        assert!(error.starts_with("`chat_template.jinja` line 2: "), "{error}");
    }

    #[test]
    fn an_endless_template_stops() {
        let source = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
        assert_eq!(template(source).unwrap().render(&[]).unwrap_err().kind(), ErrorKind::Text);
    }

    #[test]
    fn a_template_cannot_read_files() {
        let template = template("{% include 'Cargo.toml' %}").unwrap();
        assert_eq!(template.render(&[]).unwrap_err().kind(), ErrorKind::Text);
    }

    #[test]
    fn dates_follow_the_calendar() {
        assert_eq!(strftime("%d %b %Y %H:%M:%S", 951_827_696).unwrap(), "29 Feb 2000 12:34:56");
        assert_eq!(strftime("%Y-%m-%d 100%%", 0).unwrap(), "1970-01-01 100%");
        assert!(strftime("%q", 0).is_err());
    }

    #[test]
    fn the_file_wins_over_the_configuration_and_both_spellings_are_read() {
        let dir = tempfile::tempdir().unwrap();
        assert!(ChatTemplate::open(dir.path()).unwrap().is_none());
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let rendered = || ChatTemplate::open(dir.path()).unwrap().unwrap().render(&[Message::user("x")]).unwrap();
        write("tokenizer_config.json", r#"{"eos_token": {"content": "</s>"}, "chat_template": "one{{ eos_token }}"}"#);
        assert_eq!(rendered(), "one</s>");
        write(
            "tokenizer_config.json",
            r#"{"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]}"#,
        );
        assert_eq!(rendered(), "two");
        write("chat_template.jinja", "three");
        assert_eq!(rendered(), "three");
    }
}
