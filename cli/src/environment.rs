//! FLEXCOMM_* variables: a misspelt one would be ignored without a word.

use clap::{Command, CommandFactory};

/// Read elsewhere than by an option: by the training processes and by libraries, which share a node's environment.
const OTHERS: [&str; 5] =
    ["FLEXCOMM_SOCKET", "FLEXCOMM_JOB", "FLEXCOMM_NCCL", "FLEXCOMM_KERNEL_CACHE", "FLEXCOMM_NVRTC"];

fn known(command: &Command, found: &mut Vec<String>) {
    found.extend(command.get_arguments().filter_map(|arg| Some(arg.get_env()?.to_str()?.to_owned())));
    command.get_subcommands().for_each(|inner| known(inner, found));
}

/// One line for each variable that nothing reads, with the nearest that something does. Not an error: orchestrators
/// put variables of their own into the environment, FLEXCOMM_CONTROLLER_SERVICE_HOST for one.
pub(crate) fn warnings(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut read: Vec<String> = OTHERS.map(str::to_owned).to_vec();
    known(&crate::Cli::command(), &mut read);
    // What the program's own tests set is nobody's typo.
    let ours = |name: &String| name.starts_with("FLEXCOMM_") && !name.contains("_TEST_") && !read.contains(name);
    let mut unknown: Vec<String> = names.filter(ours).collect();
    unknown.sort();
    let words: Vec<&str> = read.iter().filter_map(|name| name.strip_prefix("FLEXCOMM_")).collect();
    let line = |name: String| {
        let hint = flexcomm_domain::nearest(&name["FLEXCOMM_".len()..], &words);
        let hint = hint.map_or(String::new(), |word| format!("; did you mean FLEXCOMM_{word}?"));
        format!("the environment variable {name} is set, but nothing reads it{hint}")
    };
    unknown.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_variables_are_named_with_the_nearest() {
        let said = |names: &[&str]| warnings(names.iter().map(|name| (*name).to_owned()));
        assert!(
            said(&["FLEXCOMM_LISTEN", "FLEXCOMM_TOKEN", "FLEXCOMM_SOCKET", "FLEXCOMM_AGENT_CONFIG", "PATH"]).is_empty()
        );
        assert_eq!(
            said(&["FLEXCOMM_TOKENFILE", "FLEXCOMM_XYZZYPLUGH"]),
            [
                "the environment variable FLEXCOMM_TOKENFILE is set, but nothing reads it; did you mean \
                 FLEXCOMM_TOKEN_FILE?",
                "the environment variable FLEXCOMM_XYZZYPLUGH is set, but nothing reads it"
            ]
        );
    }
}
