//! Task tokens: the execution, the effect, and an authentication code.

use super::ids::EffectId;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest as _, Sha256};

/// A parsed task token.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token {
    /// The execution's number.
    pub execution: u64,
    /// The effect.
    pub effect: EffectId,
    proof: [u8; 24],
}

/// Does not show the authentication code.
impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token")
            .field("execution", &self.execution)
            .field("effect", &self.effect)
            .finish_non_exhaustive()
    }
}

const VERSION: u8 = 1;

impl Token {
    /// The token of an effect. `seed` is the execution's secret.
    pub fn new(execution: u64, effect: EffectId, seed: &[u8; 16]) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"mayfly task token");
        hash.update(seed);
        hash.update(execution.to_be_bytes());
        hash.update(effect.0.to_be_bytes());
        let digest: [u8; 32] = hash.finalize().into();
        let mut proof = [0; 24];
        proof.copy_from_slice(&digest[..24]);
        Self { execution, effect, proof }
    }

    /// Parses a token; `None` if it has another format.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = STANDARD.decode(text).ok()?;
        let bytes: [u8; 37] = bytes.try_into().ok()?;
        let (version, rest) = bytes.split_first()?;
        let (execution, rest) = rest.split_first_chunk::<8>()?;
        let (effect, proof) = rest.split_first_chunk::<4>()?;
        (*version == VERSION).then_some(Self {
            execution: u64::from_be_bytes(*execution),
            effect: EffectId(u32::from_be_bytes(*effect)),
            proof: proof.try_into().ok()?,
        })
    }

    /// The text of the token, as given to clients.
    pub fn to_text(self) -> String {
        let mut bytes = vec![VERSION];
        bytes.extend(self.execution.to_be_bytes());
        bytes.extend(self.effect.0.to_be_bytes());
        bytes.extend(self.proof);
        STANDARD.encode(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_reads_back_and_a_forged_one_does_not_match() {
        let token = Token::new(7, EffectId(3), &[1; 16]);
        assert_eq!(Token::parse(&token.to_text()), Some(token));
        assert_ne!(Token::parse(&Token::new(7, EffectId(3), &[2; 16]).to_text()), Some(token));
        assert_eq!(Token::parse("Invalid token"), None);
        assert_eq!(Token::parse(""), None);
        assert_eq!(Token::parse(&STANDARD.encode([9; 37])), None);
    }
}
