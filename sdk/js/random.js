// Math.random in a snapshot. The engine's own takes its seed from the host at the first call: during the build there is
// no host, and a seed in the snapshot would be that of every instance. So calls at the top level of a module get numbers
// of a fixed sequence, which are the same in all instances, and calls at run time get the engine's.

const engine = Math.random;
let isLoading = true;
let state = 0x9e3779b9;

/** A number of the fixed sequence (xorshift32). */
function fixed() {
  state ^= state << 13;
  state ^= state >>> 17;
  state ^= state << 5;
  return (state >>> 0) / 2 ** 32;
}

// Modules may keep a reference to this function.
Math.random = function random() {
  return isLoading ? fixed() : engine();
};

/** Ends the fixed sequence: the module is loaded. */
export function loaded() {
  isLoading = false;
}
