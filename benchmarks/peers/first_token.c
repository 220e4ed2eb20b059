// llama.cpp from its start to the first greedy token of a prompt: first_token FILE.gguf TOKENS THREADS

#include <stdio.h>
#include <stdlib.h>

#include "llama.h"

int main(int count, char **arguments) {
    if (count != 4) return 2;
    int tokens = atoi(arguments[2]), threads = atoi(arguments[3]);
    llama_backend_init();
    struct llama_model *model = llama_model_load_from_file(arguments[1], llama_model_default_params());
    if (!model) return 1;
    struct llama_context_params options = llama_context_default_params();
    options.n_ctx = options.n_batch = tokens + 16;
    options.n_threads = options.n_threads_batch = threads;
    struct llama_context *context = llama_init_from_model(model, options);
    if (!context) return 1;
    llama_token *prompt = malloc(tokens * sizeof *prompt);
    for (int i = 0; i < tokens; i++) prompt[i] = 7 * i + 1;
    if (llama_decode(context, llama_batch_get_one(prompt, tokens))) return 1;
    const float *logits = llama_get_logits_ith(context, -1);
    int best = 0, vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = 1; i < vocabulary; i++)
        if (logits[i] > logits[best]) best = i;
    printf("%d\n", best);
    return 0;
}
