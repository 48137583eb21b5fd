//! The system message: character card and prologue in the dialogue's language.

use super::tables::{Language, Seed};

/// The card as a system message; parts that the seed leaves empty are left out.
pub(super) fn system(language: Language, seed: &Seed) -> String {
    let Seed { ai_name, ai_setting, user_name, user_setting, prologue } = seed;
    let user_is_named = !user_name.is_empty();
    let (opening, headings, rules) = match language {
        Language::Zh => {
            let user = if user_is_named { user_name.as_str() } else { "对方" };
            (
                format!("你正在参与一场角色扮演。你是{ai_name}，和你对话的人是{user}。"),
                [format!("你的角色：{ai_name}"), format!("对方的角色：{user}"), "故事从这里开始".to_owned()],
                format!(
                    "请一直以{ai_name}的身份说话和行动，性格、记忆与世界观前后一致，用新的细节推动故事；不要跳出角色，也不要代替{user}说话、行动或做决定。"
                ),
            )
        }
        Language::En => {
            let user = if user_is_named { user_name.as_str() } else { "your partner" };
            (
                format!("This is a role-play. You are {ai_name}, in conversation with {user}."),
                [format!("Your character: {ai_name}"), format!("The other character: {user}"), "Where the story begins".to_owned()],
                format!(
                    "Always speak and act as {ai_name}. Keep character, memory and world consistent, and move the story forward with \
                     fresh detail. Never step out of the role, and never speak, act or decide for {user}."
                ),
            )
        }
    };
    let mut text = opening;
    for (heading, body) in headings.iter().zip([ai_setting, user_setting, prologue]) {
        if !body.is_empty() {
            text.push_str(&format!("\n\n## {heading}\n{body}"));
        }
    }
    text.push_str("\n\n");
    text.push_str(&rules);
    text
}
