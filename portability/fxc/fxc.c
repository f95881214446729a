// Compiles HLSL with Microsoft's FXC as wgpu's DX12 back end does, in its debug and in its release builds.
// usage: fxc.exe FILE... ; d3dcompiler_47.dll is looked for beside the program
#include <stdio.h>
#include <stdlib.h>
#include <windows.h>

// The part of ID3DBlob that is needed, as COM lays it out.
typedef struct Blob Blob;
struct Blob {
    struct {
        HRESULT(WINAPI *query_interface)(Blob *, REFIID, void **);
        ULONG(WINAPI *add_ref)(Blob *);
        ULONG(WINAPI *release)(Blob *);
        void *(WINAPI *pointer)(Blob *);
        SIZE_T(WINAPI *size)(Blob *);
    } *table;
};
typedef HRESULT(WINAPI *Compile)(const void *, SIZE_T, const char *, const void *, void *, const char *, const char *,
                                 UINT, UINT, Blob **, Blob **);

enum { DEBUG = 1, SKIP_OPTIMIZATION = 4, ENABLE_STRICTNESS = 2048 };

int main(int argc, char **argv) {
    HMODULE library = LoadLibraryA("d3dcompiler_47.dll");
    Compile compile = library ? (Compile)(void *)GetProcAddress(library, "D3DCompile") : NULL;
    if (!compile) {
        printf("no d3dcompiler_47.dll\n");
        return 2;
    }
    const UINT flags[] = {ENABLE_STRICTNESS, ENABLE_STRICTNESS | DEBUG | SKIP_OPTIMIZATION};
    int failed = 0;
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file) {
            printf("%s: cannot be opened\n", argv[i]);
            return 2;
        }
        fseek(file, 0, SEEK_END);
        long size = ftell(file);
        rewind(file);
        char *text = malloc((size_t)size);
        size = (long)fread(text, 1, (size_t)size, file);
        fclose(file);
        for (int f = 0; f < 2; f++) {
            Blob *code = NULL, *said = NULL;
            if (FAILED(compile(text, (SIZE_T)size, argv[i], NULL, NULL, "main", "cs_5_1", flags[f], 0, &code, &said))) {
                printf("%s: %s\n", argv[i], said ? (char *)said->table->pointer(said) : "no message");
                failed++;
            }
            if (code) code->table->release(code);
            if (said) said->table->release(said);
        }
        free(text);
    }
    printf("%d of %d compilations\n", 2 * (argc - 1) - failed, 2 * (argc - 1));
    return failed > 0;
}
